"""The records of a cache's sets: a few replies with their keys.

A record is a msgspec Struct that the garbage collector does not track: with tuples or lists, its traversals would take 20 to
30 ms each.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import msgspec


class ReplySet(msgspec.Struct, gc=False):
    """The keys of a set in one string, oldest first, and the places of their owners. The results are fields of a subclass;
    there is a subclass for each number of results."""

    keys: bytes
    owners: bytes


NO_REPLIES = ReplySet(b"", b"")


def set_of(keys: bytes, owners: bytes, *results: bytes) -> ReplySet:
    return _shape(len(results))(keys, owners, *results)


def reply_at(replies: ReplySet, place: int) -> bytes:
    return cast(bytes, getattr(replies, _field(place)))


@cache
def _field(place: int) -> str:
    return f"result{place}"


@cache
def _shape(count: int) -> type[ReplySet]:
    """The record type for this many results."""
    fields = [(_field(index), bytes) for index in range(count)]
    return cast(type[ReplySet], msgspec.defstruct("ReplySet", fields, bases=(ReplySet,), gc=False))
