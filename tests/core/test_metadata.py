"""Metadata of tokens: one form out of many, and nothing harmful to display."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.metadata import LONGEST_VALUE, MOST_TRAITS, Metadata, read, words


def metadata(**members: Any) -> Metadata:
    found = read(orjson.dumps(members))
    assert found is not None
    return found


def traits(**members: Any) -> list[tuple[str, str]]:
    return [(trait.type, trait.value) for trait in metadata(**members).traits]


# Traits, from every common shape


@pytest.mark.parametrize(
    ("given_as", "found"),
    [
        ([{"trait_type": "Colour", "value": "blue"}], [("Colour", "blue")]),
        ([{"trait_type": "Width", "value": 8, "display_type": "number", "max_value": 10}], [("Width", "8")]),
        ([{"trait_type": "Born", "value": 1546360800, "display_type": "date"}], [("Born", "1546360800")]),
        ([{"traitType": "Colour", "value": "blue"}], [("Colour", "blue")]),
        ([{"key": "Colour", "value": "blue"}, {"name": "Size", "value": "XL"}], [("Colour", "blue"), ("Size", "XL")]),
        ([{"trait_type": "Share", "value": 0.1}], [("Share", "0.1")]),
        (
            [{"trait_type": "Rare", "value": True}, {"trait_type": "Old", "value": False}],
            [("Rare", "true"), ("Old", "false")],
        ),
        ([{"trait_type": "None", "value": None}], [("None", "")]),
        ([{"trait_type": "Zero", "value": 0}, {"trait_type": "Empty", "value": ""}], [("Zero", "0"), ("Empty", "")]),
        ([{"trait_type": "Many", "value": ["a", 1, None, True]}], [("Many", "a, 1, true")]),
        ([{"trait_type": "Deep", "value": {"a": [1, {"b": 2}]}}], [("Deep", '{"a": [1, {"b": 2}]}')]),
        ([{"trait_type": "Own", "value": {"value": 5, "max": 9}}], [("Own", "5")]),
        ([{"value": "Alone"}], [("", "Alone")]),
        ([{"trait_type": 7, "value": 7}], [("7", "7")]),
        ([{"Background": "Blue"}, {"Eyes": "Laser"}], [("Background", "Blue"), ("Eyes", "Laser")]),
        ([{"Background": "Blue", "Eyes": "Laser"}], [("Background", "Blue"), ("Eyes", "Laser")]),
        (["red", "large", 3], [("", "red"), ("", "large"), ("", "3")]),
        ([["a", "b"]], [("", "a, b")]),
        ({"depth": 3, "colour": "blue"}, [("depth", "3"), ("colour", "blue")]),
        ({"colour": {"trait_type": "Colour", "value": "blue"}}, [("colour", "blue")]),
        ('[{"trait_type": "Colour", "value": "blue"}]', [("Colour", "blue")]),
        ("[no json", []),
        ("words", []),
        ([], []),
        ({}, []),
        (None, []),
        (5, []),
        ([None, {}, [], ""], []),
    ],
)
def test_traits_are_read_from_every_common_shape(given_as: Any, found: list[tuple[str, str]]) -> None:
    assert traits(attributes=given_as) == found
    assert traits(traits=given_as) == found
    assert traits(attributes=[], traits=given_as) == found


def test_properties_are_traits_where_there_are_no_others() -> None:
    """The example of ERC-1155, and what other standards keep there beside."""
    properties = {
        "simple_property": "example value",
        "rich_property": {"name": "Name", "value": "123", "display_value": "123 Example Value", "class": "emphasis"},
        "array_property": {"name": "Name", "value": [1, 2, 3, 4], "class": "emphasis"},
        "files": [{"uri": "https://example.com/1.png", "type": "image/png"}],
        "category": "image",
        "creators": [],
    }
    assert traits(properties=properties) == [
        ("simple_property", "example value"),
        ("rich_property", "123"),
        ("array_property", "1, 2, 3, 4"),
    ]
    assert traits(attributes=[{"trait_type": "a", "value": "b"}], properties=properties) == [("a", "b")]


def test_numbers_keep_their_digits() -> None:
    body = b'{"attributes": [{"trait_type": "a", "value": 1.10}, {"trait_type": "b", "value": 115792089237316195423570985}]}'
    found = read(body)
    assert found is not None
    assert [trait.value for trait in found.traits] == ["1.10", "115792089237316195423570985"]


@pytest.mark.parametrize("digits", ["1e9999999999999999999999", "-1e-9999999999999999999999", "1E+999999999"])
def test_number_that_no_decimal_can_be_is_text(digits: str) -> None:
    found = read(b'{"name": "A", "attributes": [{"trait_type": "a", "value": %s}]}' % digits.encode())
    assert found is not None
    assert [trait.value for trait in found.traits] == [digits]
    assert (words(b'{"name": "A", "v": %s}' % digits.encode()) or {})["name"] == "A"


# Names, descriptions, images


def test_name_and_image_go_by_other_names_too() -> None:
    assert metadata(title="A").name == "A"
    assert metadata(name="", title="A").name == "A"
    assert metadata(name=7).name == "7"
    assert metadata(name={"en": "A"}).name is None
    for name in ("image", "image_url", "imageUrl"):
        assert metadata(**{name: "https://example.com/1.png"}).image == "https://example.com/1.png"
    assert metadata(image={"url": "https://example.com/1.png"}).image == "https://example.com/1.png"
    assert metadata(image_data="<svg/>").image == "data:image/svg+xml;utf8,%3Csvg/%3E"
    assert (
        metadata(image="javascript:alert(1)", image_url="https://example.com/1.png").image
        == "https://example.com/1.png"
    )


def test_empty_document_has_nothing() -> None:
    assert read(b"{}") == Metadata()


def test_html_is_text_and_stays_it() -> None:
    assert metadata(name='"><svg onload=alert(1)>').name == '"><svg onload=alert(1)>'


def test_lines_of_a_description_stay_and_other_controls_go() -> None:
    found = metadata(name="A\0\x1b[31m\u202eB\nC", description="one\r\n\r\ntwo\0 \u202ethree\n")
    assert found.name == "A[31mB C"
    assert found.description == "one\n\ntwo three"


# Hostile documents


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"x"', b"5", b"{", b"{]", b"<html>", b"\xff\xfe\xfa", b"{'a': 1}", b'{"a": 1} x', b"[" * 100_000,
     b'{"a":' * 100_000, b"\0" * 100],
)  # fmt: skip
def test_malformed_document_is_none(body: bytes) -> None:
    assert read(body) is None


def test_nesting_below_what_the_parser_takes_is_text() -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = {"a": deep}
    found = read(json.dumps({"attributes": [{"trait_type": "Deep", "value": deep}]}).encode())
    assert found is None or len(found.traits[0].value) <= LONGEST_VALUE


def test_json_as_contracts_write_it_is_read() -> None:
    assert read(b'{"name": "line\nend\ttab", "x": NaN, "y": -Infinity}') == Metadata(name="line end tab")
    assert read('\ufeff{"name": "mark"}'.encode()) == Metadata(name="mark")
    assert read('{"name": "wide"}'.encode("utf-16")) == Metadata(name="wide")


def test_nan_is_no_value() -> None:
    found = read(b'{"attributes": [{"trait_type": "a", "value": NaN}]}')
    assert found is not None
    assert found.traits[0].value == ""


def test_half_of_a_character_is_dropped() -> None:
    """JSON allows a lone surrogate; UTF-8 does not."""
    half = "\\ud800"
    body = f'{{"name": "a{half}b", "image": "https://x/{half}", "attributes": [{{"trait_type": "{half}", "value": "{half}"}}]}}'
    found = read(body.encode())
    assert found is not None
    assert found.name == "ab"
    orjson.dumps([found.name, found.image, *((trait.type, trait.value) for trait in found.traits)])


def test_everything_has_its_limit() -> None:
    found = metadata(
        name="n" * 10_000,
        description="d" * 1_000_000,
        image="data:image/png;base64," + "A" * 1_000_000,
        attributes=[{"trait_type": "t" * 1_000, "value": "v" * 2_000}] * 1_000,
    )
    assert (len(found.name or ""), len(found.description or ""), found.image) == (256, 10_000, None)
    assert len(found.traits) == MOST_TRAITS
    assert {(len(trait.type), len(trait.value)) for trait in found.traits} == {(256, LONGEST_VALUE)}


def test_number_of_a_million_digits_is_text_and_cut() -> None:
    found = read(b'{"attributes": [{"trait_type": "a", "value": ' + b"9" * 1_000_000 + b"}]}")
    assert found is not None
    assert found.traits[0].value == "9" * LONGEST_VALUE


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["value", "trait_type", "name", "x"]), inner, max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["name", "title", "description", "image", "image_data", "attributes", "traits", "properties"]),
        _JSON,
    )
)
def test_any_document_gives_text_that_can_be_sent(document: dict[str, Any]) -> None:
    found = read(json.dumps(document).encode())
    assert found is not None
    orjson.dumps([found.name, found.description, found.image, *((trait.type, trait.value) for trait in found.traits)])


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_no_bytes_break_anything(body: bytes) -> None:
    read(body)
