"""The largest body that a schema allows: larger ones are refused before they are read.

The bound allows for every character to be escaped, and for indentation. A schema without a bound, such as a string without
`maxLength`, has no largest body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from proxy.core.bounded_json import MOST_DIGITS

SCHEMAS_AT = "#/components/schemas/"
# Line breaks and spaces around each value, and around the whole body.
SPACE, SPACE_AROUND = 40, 4096
# The bytes of a character that is written as an escape, such as `\\u0041`.
ESCAPED = 6
_COMBINED = ("anyOf", "oneOf", "allOf")
_KEYWORD = len("false")


class BodySizes:
    def __init__(self, schemas: Mapping[str, Any], *, longer_than: int) -> None:
        self._schemas = schemas
        self._longer_than = longer_than

    def __repr__(self) -> str:
        return f"<BodySizes of {len(self._schemas)} schemas>"

    def largest(self, schema: Mapping[str, Any]) -> int | None:
        """The most bytes of a body; None without a bound."""
        size = self._size(schema)
        return None if size is None else size + SPACE_AROUND

    def long_lists(self, schema: Mapping[str, Any]) -> dict[tuple[str, ...], int]:
        """The lists that may have more items than `longer_than`: the most items, by the names that lead to the list."""
        return {path: most for path, most in self._lists(schema, ()) if most > self._longer_than}

    def _size(self, schema: Any) -> int | None:
        if schema is False:
            return 0
        if not isinstance(schema, Mapping):
            return None
        if (options := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            return max(_escaped(orjson.dumps(each).decode()) for each in options)
        sizes = [self._size(each) for each in self._parts(schema)]
        kinds = schema.get("type", ())
        sizes += [self._of_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        known = [size for size in sizes if size is not None]
        return max(known) if known and len(known) == len(sizes) else None

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> int | None:
        match kind:
            case "string":
                return None if "maxLength" not in schema else ESCAPED * schema["maxLength"] + 2
            case "integer" | "number":
                return MOST_DIGITS
            case "boolean" | "null":
                return _KEYWORD
            case "array":
                item = self._size(schema.get("items"))
                return None if item is None or "maxItems" not in schema else schema["maxItems"] * (item + SPACE) + 2
            case _:
                return self._of_object(schema)

    def _of_object(self, schema: Mapping[str, Any]) -> int | None:
        if schema.get("additionalProperties") is not False:
            return None
        size = 2
        for name, each in schema["properties"].items():
            value = self._size(each)
            if value is None:
                return None
            size += _escaped(name) + value + SPACE
        return size

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas that this one refers to or is combined of."""
        if "$ref" in schema:
            target: Any = self._schemas
            for step in schema["$ref"].removeprefix(SCHEMAS_AT).split("/"):
                target = target[step]
            yield target
        for word in _COMBINED:
            yield from schema.get(word, ())

    def _lists(self, schema: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
        if not isinstance(schema, Mapping):
            return
        for each in self._parts(schema):
            yield from self._lists(each, path)
        for name, each in schema.get("properties", {}).items():
            yield from self._lists(each, (*path, name))
        if "maxItems" in schema:
            yield path, schema["maxItems"]
        yield from self._lists(schema.get("items"), path)


def _escaped(text: str) -> int:
    return ESCAPED * len(text) + 2
