"""Error messages for values that a schema refuses. They say which values or members are allowed, not which keyword failed.

The validator's own messages quote regular expressions and leave out most values of a long enum. A schema with a pattern
describes it in `x-form` ("an EVM address: 0x and 40 hex digits").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import jsonschema_rs
import orjson

from proxy.core.access import has_key
from proxy.web.timestamps import MOMENT

# The longest text with a value of the caller in it.
MAX_WORDS = 250
MAX_VALUE = 100
_INVALID = "is not valid"
# The format of times that people write too: a date alone is one, and UTC is the default time zone.
ISO_8601 = "iso-8601"
# Names of the caller that may be repeated: shorter than an API key.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}", re.ASCII)
_TYPES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_Kinds = jsonschema_rs.ValidationErrorKind


class ValidationMessages:
    def __init__(self, document: dict[str, Any]) -> None:
        """`document`: the parts of the API spec that have schemas."""
        self._forms = dict(_forms(document))

    def __repr__(self) -> str:
        return f"<ValidationMessages {len(self._forms)} forms>"

    def of(self, error: jsonschema_rs.ValidationError, schema: Mapping[str, Any]) -> str:
        """`schema`: the one that the error is from."""
        match error.kind:
            case _Kinds.Enum():
                return f"must be {_choice(error.kind.options)}{_not(error)}"
            case _Kinds.Pattern() if form := self._forms.get(error.kind.pattern):
                return f"must be {form}{_not(error)}"
            case _Kinds.Type():
                return f"must be {' or '.join(_TYPES[each] for each in error.kind.types)}{_not(error)}"
            case _Kinds.Format() if error.kind.format in (ISO_8601, "date-time"):
                return MOMENT
            case _Kinds.Required():
                return "is required"
            case _Kinds.AdditionalProperties():
                name = member_of(error)
                return unknown_name(name, _members_beside(error, schema)) if name else "has a member that is unknown"
            case _:
                return _safe(error.message)


def member_of(error: jsonschema_rs.ValidationError) -> str:
    """The member of the invalid object that is missing or unknown, if it is one of these and may be repeated."""
    match error.kind:
        case _Kinds.Required():
            return str(error.kind.property)
        case _Kinds.AdditionalProperties() if _NAME.fullmatch(name := error.kind.unexpected[0]):
            return name
        case _:
            return ""


def unknown_name(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    advice = f"did you mean {nearest[0]}? " if nearest else ""
    return f"is unknown; {advice}known: {', '.join(known) or 'none'}"


def _members_beside(error: jsonschema_rs.ValidationError, schema: Any) -> Collection[str]:
    """The members of the object that has an unknown one."""
    for step in error.schema_path[:-1]:
        schema = schema[step]
    return list(schema.get("properties", ()))


def _forms(node: Any) -> Iterator[tuple[str, str]]:
    """Each pattern in the document that has a form."""
    if isinstance(node, dict):
        if isinstance(form := node.get("x-form"), str):
            yield node["pattern"], form
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _forms(part)


def _choice(options: list[Any]) -> str:
    texts = [orjson.dumps(option).decode() for option in options]
    return texts[0] if len(texts) == 1 else f"one of {', '.join(texts)}"


def _not(error: jsonschema_rs.ValidationError) -> str:
    """Repeat the value, unless it is long, may contain an API key, or the validator masks it."""
    given = orjson.dumps(error.instance).decode()
    is_shown = len(given) <= MAX_VALUE and error.message.startswith(given) and not has_key(given)
    return f", not {given}" if is_shown else ""


def _safe(message: str) -> str:
    return message if len(message) < MAX_WORDS and not has_key(message) else _INVALID
