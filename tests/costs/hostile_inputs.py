"""Hostile inputs made from the API spec: the largest values that a schema allows, and texts that are dear to parse or to walk.

Every operation gets every shape, so an operation is covered from the day it is in the spec. A schema that leaves its members
open (the config of a webhook) has its largest values in `FILTERS`, by event type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import quote

import orjson

from proxy.chains.evm.watch_index import KINDS
from proxy.chains.evm.webhook_filters import MOST_LOG_ADDRESSES, MOST_VALUES, most_addresses

DIGITS = 10_000
# Longer request lines are refused before anything is read.
MOST_QUERY = 6_000
SCHEMAS_AT = "#/components/schemas/"
# Stands for the hostile text until the rest of the body is encoded.
_MARK = "@hostile@"

Schema = Mapping[str, Any]
Shapes = Iterator[tuple[str, bytes]]


def address(number: int) -> str:
    return f"0x{number + (1 << 152):040x}"


def topic(number: int) -> str:
    return f"0x{number + (1 << 250):064x}"


# Texts of JSON, filled up to a number of bytes


def _list(item: bytes) -> Callable[[int], bytes]:
    return lambda size: b"[" + b",".join([item] * ((size - 2) // (len(item) + 1))) + b"]"


def _members(size: int) -> bytes:
    return b"{" + b",".join(b'"m%07d":0' % number for number in range((size - 2) // 13)) + b"}"


def _duplicates(size: int) -> bytes:
    return b"{" + b",".join([b'"a":0'] * ((size - 2) // 6)) + b"}"


# Each text is a value. The names say what is dear about them.
TEXTS: dict[str, Callable[[int], bytes]] = {
    "containers": _list(b"[]"),
    "objects": _list(b'{"a":0}'),
    "nesting": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "nesting below the parser's limit": _list(b"[" * 1000 + b"]" * 1000),
    "members": _members,
    "duplicated names": _duplicates,
    "strings": _list(b'""'),
    "numbers": _list(b"0"),
    "one string": lambda size: b'"' + b"x" * (size - 2) + b'"',
    "escapes": lambda size: b'"' + b"\\u20ac" * ((size - 2) // 6) + b'"',
    "digits": lambda size: b"9" * min(size, DIGITS),
    "fractions": _list(b"1." + b"1" * 300 + b"e5"),
    "U+0000": lambda size: b'"\\u0000"',
    "lone surrogate": lambda size: b'"\\ud800"',
    "U+0000 in a name": lambda size: b'{"\\u0000":"\\u0000"}',
    "lone surrogate in a name": lambda size: b'{"\\ud800":0}',
}


@cache
def text_of(shape: str, size: int) -> bytes:
    return TEXTS[shape](size)


class Inputs:
    """Inputs for the schemas of an API spec."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def __repr__(self) -> str:
        return f"<Inputs of {self._document['info']['title']}>"

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            found: Any = self._document
            for step in schema["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
        return schema

    # Values that pass the schema

    def sample(self, schema: Schema) -> Any:
        """A valid value: an example, or the first of everything that is required."""
        found = self.resolved(schema)
        for name in ("const", "default"):
            if found.get(name) is not None:
                return found[name]
        for name in ("examples", "enum"):
            if found.get(name):
                return found[name][0]
        for name in ("anyOf", "oneOf", "allOf"):
            if name in found:
                return self.sample(found[name][0])
        kinds = found.get("type", "object")
        match kinds if isinstance(kinds, str) else kinds[0]:
            case "object":
                needed = found.get("required", ())
                return {name: self.sample(found["properties"][name]) for name in needed}
            case "array":
                return [self.sample(found.get("items", {}))] * max(1, found.get("minItems", 0))
            case "integer" | "number":
                return found.get("minimum", 1)
            case "boolean":
                return True
            case _:
                return "x" * max(1, found.get("minLength", 0))

    def largest(self, schema: Schema, size: int) -> Any:
        """A value of about `size` bytes at most, with all members, the longest lists and the longest strings."""
        found = self.resolved(schema)
        if "enum" in found or "const" in found:
            return self.sample(found)
        for name in ("anyOf", "oneOf"):
            if name in found:
                return self.largest(found[name][-1], size)
        kinds = found.get("type", "object")
        match kinds if isinstance(kinds, str) else kinds[0]:
            case "object":
                inner = found.get("properties", {})
                share = size // max(1, len(inner))
                return {name: self.largest(each, share) for name, each in inner.items()} or self.sample(found)
            case "array":
                item = self.largest(found.get("items", {}), size // 4)
                count = min(found.get("maxItems", size), size // (len(orjson.dumps(item)) + 1))
                return [_varied(item, number) for number in range(max(1, count))]
            case "integer" | "number":
                return found.get("maximum", found.get("minimum", 2**53 - 1))
            case "string" if "pattern" not in found and "format" not in found:
                return "x" * min(size, found.get("maxLength", size))
            case _:
                return self.sample(found)

    # Bodies

    def bodies(self, schema: Schema, size: int) -> Shapes:
        """Bodies of up to `size` bytes: each shape in the member that takes the most, and beside the members."""
        base = self.sample(schema)
        if not isinstance(base, dict):
            base = {}
        place = self.place(schema)
        yield "largest", orjson.dumps(self.largest(schema, size * 9 // 10))
        room = size - 2000  # for the other members
        for name in TEXTS:
            yield name, _with(base, place, text_of(name, room))
        yield "unknown member", _with(base, "unknown", text_of("containers", room))
        yield "only containers", text_of("containers", room)
        repeated = orjson.dumps({place: base.get(place)})[1:-1]
        yield "its members again and again", b"{" + b",".join([repeated] * (size // (len(repeated) + 1))) + b"}"
        for name, found in self._texts_in(base):
            yield f"U+0000 in {name}", found

    def place(self, schema: Schema) -> str:
        """The member with the most room: one whose content the schema leaves open, else a list, else any."""
        inner = self.resolved(schema).get("properties", {})
        if not inner:
            return "a"

        def rank(name: str) -> int:
            found = self.resolved(inner[name])
            is_open = found.get("type") == "object" and "properties" not in found
            return 0 if is_open else 1 if found.get("type") == "array" else 2 if found.get("type") == "object" else 3

        return str(min(inner, key=rank))

    def _texts_in(self, base: dict[str, Any]) -> Shapes:
        """The sample, with U+0000 in one of its strings."""
        for name, value in base.items():
            if isinstance(value, str):
                yield name, orjson.dumps({**base, name: value + "\0"})

    # Queries and paths

    def queries(self, parameters: Mapping[str, Schema]) -> Iterator[tuple[str, str]]:
        """Query strings. `parameters`: their schemas by name."""
        largest = {name: self.largest(schema, 1000) for name, schema in parameters.items()}
        yield "largest", "&".join(f"{name}={shown(value)}" for name, value in largest.items())
        for shape, text in _QUERY_TEXTS.items():
            for name, schema in parameters.items():
                kind = self.resolved(schema).get("type")
                if kind in ("integer", "boolean") and shape not in ("digits", "U+0000"):
                    continue  # one refusal is like another
                yield f"{shape} in {name}", f"{name}={text}"
        yield "many names", "&".join(f"n{number}=" for number in range(MOST_QUERY // 7))


_QUERY_TEXTS = {
    "U+0000": "%00",
    "lone surrogate": "%ED%A0%80",
    "digits": "9" * MOST_QUERY,
    "a long text": "x" * MOST_QUERY,
    "a long list": "a," * (MOST_QUERY // 2) + "a",
}


def shown(value: Any) -> str:
    if isinstance(value, list):
        return quote(",".join(map(str, value))[:MOST_QUERY])
    return str(value).lower() if isinstance(value, bool) else quote(str(value)[:MOST_QUERY])


def _varied(item: Any, number: int) -> Any:
    """Hex texts differ, so that a list of them has no duplicates."""
    if isinstance(item, str) and item.startswith("0x") and len(item) >= 20:
        return item[:-10].lower() + f"{number:010x}"
    return item


def _with(base: dict[str, Any], place: str, text: bytes) -> bytes:
    """The body with a text in the place of a member."""
    return orjson.dumps({**base, place: _MARK}).replace(b'"%s"' % _MARK.encode(), text, 1)


# Configs of webhooks


def log_filter(addresses: int = MOST_LOG_ADDRESSES, topics: int = 1000) -> dict[str, Any]:
    """The largest filter of logs."""
    return {
        "address": [address(number) for number in range(addresses)],
        "topics": [[topic(index * topics + number) for number in range(topics)] for index in range(4)],
    }


def _values(count: int) -> dict[str, Any]:
    return {
        "contracts": [address(number) for number in range(count)],
        "from": [address(number) for number in range(count)],
        "to": [address(number) for number in range(count)],
        "token_ids": [str(number) for number in range(count)],
        "tx_hashes": [topic(number) for number in range(count)],
        "selectors": [f"0x{number:08x}" for number in range(count)],
        "topics": log_filter(topics=count)["topics"],
    }


_MEMBERS = {
    "activity": ("selectors", "topics"),
    "token": ("contracts", "from", "to", "selectors", "topics"),
    "nft": ("contracts", "token_ids", "selectors", "topics"),
    "mined": ("tx_hashes",),
    "log": ("topics",),
    "pending": ("selectors",),
}
_WITH_ADDRESSES = frozenset({"activity", "token", "nft", "log", "internal", "pending"})


def largest_config(event_type: str, addresses: int | None = None) -> dict[str, Any]:
    """The largest filter of an event type, with at most so many addresses."""
    kind = KINDS[event_type]
    values = _values(MOST_VALUES)
    found: dict[str, Any] = {name: values[name] for name in _MEMBERS.get(kind, ())}
    if kind in _WITH_ADDRESSES:
        most = min(most_addresses(event_type), 99_999 if addresses is None else addresses)
        found["addresses"] = [address(number) for number in range(most)]
    return found


EVENT_TYPES = tuple(KINDS)
