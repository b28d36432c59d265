"""A token's metadata in one shape: names, an image, and traits as text, whatever form they were written in.

The document is untrusted. It is parsed as leniently as wallets do, because contracts build JSON by hand: line breaks inside
strings, NaN, numbers of any length. Values are cleaned and truncated; unreadable ones are None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

from proxy.core import display_text, nesting, uris

MOST_TRAITS = 256
LONGEST_VALUE = 1000
# Deeper than any real metadata.
DEEPEST = 200

# The names of each member, the usual one first.
_NAMES = ("name", "title")
_IMAGES = ("image", "image_url", "imageUrl", "image_uri", "image_data", "svg_image_data")
_TRAITS = ("attributes", "traits")
_TYPES = ("trait_type", "traitType", "trait", "key", "name", "type", "label")
_VALUES = ("value", "trait_value", "traitValue", "val", "display_value")
# Members beside a trait's value that say how to draw it. They are not traits.
_ABOUT = frozenset(
    {*_TYPES, *_VALUES, "display_type", "max_value", "trait_count", "order", "class", "css", "description"}
)
# Members of `properties` that other standards define and that are not traits.
_NOT_TRAITS = frozenset({"files", "category", "creators", "collection", "image", "name", "description"})


@dataclass(frozen=True, slots=True)
class Trait:
    type: str
    value: str


@dataclass(frozen=True, slots=True)
class Metadata:
    name: str | None = None
    description: str | None = None
    image: str | None = None
    traits: tuple[Trait, ...] = ()


NOTHING = Metadata()


def read(body: bytes) -> Metadata | None:
    """The metadata in a document; None if it has none."""
    try:
        data = _parsed(body)
        return _metadata(data) if isinstance(data, dict) else None
    except RecursionError:
        return None


def words(body: bytes) -> dict[str, str] | None:
    """The members of a document that are text, unchanged; None if it is not a document."""
    try:
        data = _parsed(body)
    except RecursionError:
        return None
    if not isinstance(data, dict):
        return None
    # JSON allows lone surrogates; UTF-8 does not.
    members = ((name, value) for name, value in data.items() if isinstance(value, str))
    return {name.encode(errors="replace").decode(): value.encode(errors="replace").decode() for name, value in members}


def _metadata(data: dict[str, Any]) -> Metadata:
    return Metadata(
        name=display_text.cleaned(_first_text(data, _NAMES), display_text.NAME),
        description=_paragraphs(_first_text(data, ("description",))),
        image=_image(data),
        traits=tuple(islice(_all_traits(data), MOST_TRAITS)),
    )


def _parsed(text: str | bytes) -> Any:
    """None if it is not JSON, not text, or nested so deeply that parsing it would exhaust the stack."""
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        if nesting.is_deeper(text.encode("utf-8", "surrogatepass"), DEEPEST):
            return None
        return json.loads(text, strict=False, parse_float=_decimal, parse_int=_integer, parse_constant=_nothing)
    except (ValueError, ArithmeticError):
        return None


def _integer(digits: str) -> int | str:
    """An int if it is short; otherwise text, because Python refuses to parse more than 4,300 digits."""
    return int(digits) if len(digits) <= 100 else digits


def _decimal(digits: str) -> Decimal | str:
    """A Decimal; text if it is long, or too large for one, such as `1e9999999999999999999999`."""
    try:
        return Decimal(digits) if len(digits) <= 100 else digits
    except ArithmeticError:
        return digits


def _nothing(_: str) -> None:
    """NaN and the infinities become None."""


def _first_text(data: dict[str, Any], names: Iterable[str]) -> str | None:
    values = (data.get(name) for name in names)
    return next((text for value in values if (text := _scalar(value))), None)


def _paragraphs(text: str | None) -> str | None:
    """Cleaned line by line, to keep the line breaks."""
    if text is None:
        return None
    lines = text[: 2 * display_text.DESCRIPTION].splitlines()
    lines = [display_text.cleaned(line, display_text.DESCRIPTION) or "" for line in lines]
    return "\n".join(lines)[: display_text.DESCRIPTION].strip() or None


def _image(data: dict[str, Any]) -> str | None:
    for name in _IMAGES:
        value = data.get(name)
        if isinstance(value, dict):
            value = next((value[key] for key in ("url", "uri", "src") if isinstance(value.get(key), str)), None)
        if isinstance(value, str) and (image := uris.shown(value)):
            return image
    return None


# Traits


def _all_traits(data: dict[str, Any]) -> Iterator[Trait]:
    for name in _TRAITS:
        traits = _traits(data.get(name))
        if (first := next(traits, None)) is not None:
            yield first
            yield from traits
            return
    properties = data.get("properties")
    if isinstance(properties, dict):
        yield from _traits({key: value for key, value in properties.items() if key not in _NOT_TRAITS})
    else:
        yield from _traits(properties)


def _traits(value: Any) -> Iterator[Trait]:
    """The traits in a list of objects or of plain values, in an object by name, or in JSON text of either."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = _parsed(value)
    if isinstance(value, dict):
        for key, each in value.items():
            yield Trait(_type(key), _text(each))
    elif isinstance(value, list):
        for each in value:
            yield from _traits_of_item(each)


def _traits_of_item(item: Any) -> Iterator[Trait]:
    if not isinstance(item, dict):
        if text := _text(item):
            yield Trait("", text)
        return
    kind = next((item[name] for name in _TYPES if _scalar(item.get(name))), None)
    if any(name in item for name in _VALUES):
        yield Trait(_type(kind), _text(item))
        return
    # The item has no member that is known as a value, so each of its members is a trait.
    yield from (Trait(_type(key), _text(value)) for key, value in item.items() if key not in _ABOUT)


def _type(value: Any) -> str:
    return display_text.cleaned(_scalar(value), display_text.NAME) or ""


def _text(value: Any) -> str:
    """One line of text for any value; an object with a `value` member counts as that value."""
    for _ in range(2):  # a trait's, and its value's own
        if isinstance(value, dict) and (name := next((name for name in _VALUES if name in value), None)):
            value = value[name]
    if isinstance(value, list) and not any(isinstance(each, dict | list) for each in value):
        value = ", ".join(text for each in value[:MOST_TRAITS] if (text := _scalar(each)))
    elif isinstance(value, dict | list):
        value = json.dumps(value, default=str, ensure_ascii=False)
    return display_text.cleaned(_scalar(value), LONGEST_VALUE) or ""


def _scalar(value: Any) -> str | None:
    """The text of a scalar; None for null, objects and lists."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | Decimal) else None
