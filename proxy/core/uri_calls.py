"""Calls in the form of a URL: `GET /block?height=5` for the method `block` with the params `{"height": "5"}`.

CometBFT has every method in this form too. The type of a parameter decides how its value is written in JSON: a family's file
names the types. As at a node, texts are in double quotes, and bytes are texts or start with 0x.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from proxy.core.rest_routes import BadTarget

# `bytes` are in base64 in JSON, and `hex` is in hexadecimal digits. Integers are JSON strings.
UriType = Literal["integer", "boolean", "text", "bytes", "hex"]
URI_TYPES: Final = get_args(UriType)
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")
_HEX: Final = re.compile(r"0x((?:[0-9A-Fa-f]{2})*)")
_encode: Final = msgspec.json.Encoder().encode


def params_of(method: str, types: Mapping[str, UriType], query: Mapping[str, Sequence[str]]) -> bytes:
    """The params of a call. `types`: by the name of a parameter, or by `method.parameter` where a method differs. Raises
    BadTarget."""
    params = {}
    for name, values in query.items():
        if (kind := types.get(f"{method}.{name}", types.get(name))) is None:
            known = ", ".join(each for each in types if "." not in each)
            raise BadTarget(f"{name[:40]!r} is not a parameter of any method: use one of {known}")
        if len(values) > 1:
            raise BadTarget(f"the parameter {name!r} is there twice: send it once")
        if values[0]:
            params[name] = _value(name, kind, values[0])
    return _encode(params)


def _value(name: str, kind: UriType, text: str) -> Any:
    quoted = text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else None
    match kind:
        case "integer":
            if not _INTEGER.fullmatch(quoted or text):
                raise BadTarget(f"the parameter {name!r} must be an integer, such as {name}=5")
            return quoted or text
        case "boolean":
            if text not in ("true", "false"):
                raise BadTarget(f"the parameter {name!r} must be true or false")
            return text == "true"
        case "text":
            if quoted is None:
                raise BadTarget(f"the parameter {name!r} must be in double quotes, such as {name}=%22value%22")
            return quoted
        case "bytes" | "hex":
            data = _bytes(name, quoted, text)
            return data.hex() if kind == "hex" else base64.b64encode(data).decode()


def _bytes(name: str, quoted: str | None, text: str) -> bytes:
    if quoted is not None:
        return quoted.encode("latin-1")
    if (digits := _HEX.fullmatch(text)) is None:
        raise BadTarget(f"the parameter {name!r} must be hexadecimal, such as {name}=0x1f, or a text in double quotes")
    return bytes.fromhex(digits[1])
