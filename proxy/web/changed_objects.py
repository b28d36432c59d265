"""The object that an operation changes, as a read of it shows it: for the log of actions.

An operation changes the object that a GET of the same path reads, or of the path up to its only parameter: PATCH
/account/keys/{id} and POST /account/keys/{id}/rotate change what GET /account/keys/{id} returns, and POST /account/keys creates
it. Members that the GET does not have, such as a new key, are shown once to the caller and never recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.core.action_changes import ChangedMembers, changed_members
from proxy.web.api_spec import SCHEMAS_AT, ApiOperation, ApiSpec
from proxy.web.reply import EncodedList

# Longer lists would take the loop's time, and the log keeps only a few of their values.
MOST_DECODED = 16_384

Changes = tuple[ChangedMembers | None, ChangedMembers | None]
NO_CHANGES: Changes = (None, None)


@dataclass(frozen=True, slots=True)
class ChangedObject:
    """`read`: the operation that reads the object, and the members that it returns."""

    read: ApiOperation
    members: frozenset[str]
    is_created: bool
    is_deleted: bool

    def changes(self, before: Mapping[str, Any] | None, reply: Any) -> Changes:
        """The fields that a change with this reply altered. `before`: the object before it; None if that is unknown."""
        if before is None and not self.is_created:
            return NO_CHANGES
        after = None if self.is_deleted or not isinstance(reply, Mapping) else self._visible(reply)
        if after is None and not self.is_deleted:
            return NO_CHANGES
        old, new = changed_members(_decoded(before), _decoded(after))
        return old or None, new or None

    def _visible(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in reply.items() if name in self.members}


def _decoded(body: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The object, with lists that a read has encoded ahead: short ones as they were, long ones by the number of values."""
    if body is None:
        return None
    return {name: _decoded(value) if isinstance(value, Mapping) else _value(value) for name, value in body.items()}


def _value(value: Any) -> Any:
    if not isinstance(value, EncodedList):
        return value
    return orjson.loads(value.json) if len(value.json) <= MOST_DECODED else f"{value.length} values"


class ChangedObjects:
    def __init__(self, spec: ApiSpec) -> None:
        self._document = spec.document
        self._reads = {operation.path: operation for operation in spec.operations.values() if operation.is_read}

    def __repr__(self) -> str:
        return f"<ChangedObjects {len(self._reads)} reads>"

    def of(self, operation: ApiOperation) -> ChangedObject | None:
        """None if nothing reads what the operation changes."""
        read, is_created = self._read_of(operation), False
        if read is None and operation.method == "POST":
            read, is_created = self._read_of_created(operation), True
        if read is None:
            return None
        schema = self._document["paths"][read.path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        members = frozenset(self._properties(schema))
        return ChangedObject(read, members, is_created, is_deleted=operation.method == "DELETE")

    def _read_of(self, operation: ApiOperation) -> ApiOperation | None:
        path = operation.path
        if operation.method in ("PATCH", "PUT") and path in self._reads:
            return self._reads[path]
        return self._reads.get(path[: path.index("}") + 1]) if path.count("}") == 1 else None

    def _read_of_created(self, operation: ApiOperation) -> ApiOperation | None:
        wanted = re.compile(re.escape(operation.path) + r"/\{[a-z_]+\}")
        return next((read for path, read in self._reads.items() if wanted.fullmatch(path)), None)

    def _properties(self, schema: Mapping[str, Any]) -> Iterator[str]:
        if name := str(schema.get("$ref", "")).removeprefix(SCHEMAS_AT):
            yield from self._properties(self._document["components"]["schemas"][name])
        for part in schema.get("allOf", ()):
            yield from self._properties(part)
        yield from schema.get("properties", ())
