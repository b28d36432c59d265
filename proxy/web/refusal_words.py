"""The words for a value that its schema refuses: which values are allowed, not the keyword that failed.

The validator's own messages quote regular expressions and leave out most values of a long enum. A schema with a pattern says
in `x-form` what the pattern stands for ("an EVM address: 0x and 40 hex digits").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import orjson

from proxy.core.access import KEY_PREFIXES

# The longest text with a value of the caller in it.
MAX_WORDS = 250
MAX_VALUE = 100
_INVALID = "is not valid"
_Kinds = jsonschema_rs.ValidationErrorKind


class RefusalWords:
    def __init__(self, document: dict[str, Any]) -> None:
        self._forms = dict(_forms(document))

    def __repr__(self) -> str:
        return f"<RefusalWords {len(self._forms)} forms>"

    def of(self, error: jsonschema_rs.ValidationError) -> str:
        match error.kind:
            case _Kinds.Enum():
                return f"must be {_choice(error.kind.options)}{_not(error)}"
            case _Kinds.Pattern() if form := self._forms.get(error.kind.pattern):
                return f"must be {form}{_not(error)}"
            case _:
                return _safe(error.message)


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
    is_shown = len(given) <= MAX_VALUE and error.message.startswith(given) and not _has_key(given)
    return f", not {given}" if is_shown else ""


def _safe(message: str) -> str:
    return message if len(message) < MAX_WORDS and not _has_key(message) else _INVALID


def _has_key(text: str) -> bool:
    return any(prefix in text for prefix in KEY_PREFIXES)
