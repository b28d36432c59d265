"""What a family of chains knows about its JSON-RPC methods.

A family is a table: a method that is not in it does not exist. The flow asks the table and never the chain's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["read", "write", "filter", "subscription"]


@dataclass(frozen=True, slots=True)
class Method:
    """How one method behaves, whichever network it is called on.

    `kind`: a read may be repeated; a write is sent once; a filter belongs to the upstream that made it; a subscription
    needs a socket. `block_at`: the place of the block parameter among the params, where there is one.
    """

    name: str
    kind: Kind = "read"
    block_at: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    methods: Mapping[str, Method]


def table(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}
