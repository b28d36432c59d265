"""What a family of chains knows about its JSON-RPC methods.

A family is a table and five functions: a method that is not in the table does not exist, and everything the flow has to
know about a call (which block is it about, how long may its answer be kept, can an empty answer be believed) it asks
through `Family`, never by a method's or a chain's name. A new family is a new module and one line in `families.py`.

Two kinds of time rule all answers. The *head* moves: an answer that depends on it is good until it does. What lies at or
below the *final* height cannot change any more: such an answer is good for ever. A tag (`latest`, and just as much
`finalized`) is a moving head, never final data; and an empty answer proves nothing, so it is never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

MethodKind = Literal["read", "write", "filter", "subscription"]
CacheRule = Literal["never", "static", "hash", "block", "head"]
Lifetime = Literal["never", "head", "forever"]


@dataclass(frozen=True, slots=True)
class Method:
    """How one method behaves, whichever network it is called on.

    `kind`: a read may be repeated; a write is sent once; a filter belongs to the upstream that made it; a subscription
    needs a socket.
    `block_at`: the place of the block parameter among the params, where there is one. `span`: that parameter is an object
    with a first and a last block.
    `cache`: what names the answer. `static`: the network alone. `hash`: a hash among the params, so that the block found in
    the answer tells its age. `block`: the block parameter. `head`: nothing but the head. `never`: it is not kept.
    `fresh`: at a moving block it is not kept either, since the caller's own writes must show at once (nonces).
    `retry`: it may be asked again of another upstream.
    `tip`: the answer depends on the head: always where there is no block parameter, else when that names a moving block.
    `empty`: an empty answer is doubtful when the upstream that gave it is behind.
    """

    name: str
    kind: MethodKind = "read"
    block_at: int | None = None
    span: bool = False
    cache: CacheRule = "never"
    fresh: bool = False
    retry: bool = False
    tip: bool = False
    empty: bool = False


class BlockRef(msgspec.Struct, frozen=True, gc=False):
    """The block that a call is about: a `number`, a `hash`, a `tag`, or none.

    `tag` is set beside a number or a hash where the family asks for a commitment with it. A Struct, since making a frozen
    dataclass costs 1 µs and this 0.05.
    """

    kind: Literal["number", "hash", "tag", "none"]
    number: int = -1
    tag: str = ""

    @property
    def moves(self) -> bool:
        """It names another block tomorrow."""
        return self.kind == "tag" and self.tag != "earliest"


NONE = BlockRef("none")
HASH = BlockRef("hash")


@dataclass(frozen=True, slots=True)
class Family:
    """The seam between the flow and a family. All functions are pure and safe for any bytes a caller may send.

    `block_ref(method, params)`: the block a call is about, from its raw params.
    `lifetime(method, params, result, ref, head, final)`: how long a good result may be kept.
    `is_archive(ref, head)`: the call reads state that an ordinary upstream has dropped.
    `is_empty(method, result)`: the result is one that an upstream which is behind would give too.
    `verdicts`: codes of errors that are the answer, whoever is asked and whatever their text says.
    """

    name: str
    methods: Mapping[str, Method]
    block_ref: Callable[[Method, bytes], BlockRef]
    lifetime: Callable[[Method, bytes, bytes, BlockRef, int, int], Lifetime]
    is_archive: Callable[[BlockRef, int], bool]
    is_empty: Callable[[Method, bytes], bool]
    verdicts: frozenset[int] = frozenset()


def table(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}
