"""Rendezvous hashing: which of several members owns a name.

All members agree without asking each other. If one leaves, only its names get other owners.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def owner_of(name: str, members: Iterable[str]) -> str:
    """The member with the highest hash of itself and the name; empty if there are none."""
    return max(members, key=lambda member: blake2b(f"{member}\0{name}".encode(), digest_size=8).digest(), default="")
