"""JSON of clients is read like any parser reads it, in short steps, unless it exceeds a bound."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import bounded_json
from proxy.core.bounded_json import (
    MOST_CONTAINERS,
    MOST_LONG_BYTES,
    MOST_OUTLINE_BYTES,
    MOST_STRINGS,
    MOST_VALUES,
    STEP_BYTES,
    JsonReader,
    RefusedJson,
    parse_bounded,
)

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
LISTS = st.lists(st.from_regex(r"\A[a-z,\[{:]{0,5}\Z"), min_size=10, max_size=60)
VALUES = st.recursive(
    SCALARS | TEXT | LISTS,
    lambda each: st.lists(each, max_size=4) | st.dictionaries(TEXT, each, max_size=4),
    max_leaves=12,
)


def read(text: bytes | bytearray) -> Any:
    reader = JsonReader(text)
    while not reader.step():
        pass
    return reader.value()


def read_in_parts(text: bytes, size: int) -> Any:
    reader = JsonReader()
    for start in range(0, len(text), size):
        reader.add(text[start : start + size])
        while not reader.step():
            pass
    reader.end()
    while not reader.step():
        pass
    return reader.value()


def refusal(text: bytes) -> str:
    with pytest.raises(RefusedJson) as caught:
        read(text)
    return str(caught.value)


@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_value_is_read_as_parsers_read_it(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert read(text) == orjson.loads(text)
    assert read(bytearray(text)) == orjson.loads(text)


@pytest.mark.parametrize("size", [1_000, 8_192, STEP_BYTES + 1, 100_000])
def test_text_is_read_while_it_arrives(size: int) -> None:
    value = {
        "long": ["0x" + "ab" * 40_000, {"é": "x" * (STEP_BYTES - 3)}, "y" * 200_000],
        "list": [f"0x{number:040x}" for number in range(5_000)],
        "few": [{"name": f'"quoted" {number}', "n": number} for number in range(150)],
    }
    text = json.dumps(value).encode()
    assert read_in_parts(text, size) == value


def test_text_is_dropped_once_it_was_read() -> None:
    reader = JsonReader()
    part = b'"0x%040x",' % 7 * 200
    for number in range(500):
        reader.add(b'{"a":[' + part if number == 0 else part)
        while not reader.step():
            pass
        assert len(reader._text) < 3 * STEP_BYTES


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * MOST_CONTAINERS * 200,
        b'["' + b"x" * (MOST_LONG_BYTES + STEP_BYTES),
        b'["' + b"x" * STEP_BYTES + b"\\n" + b"x" * STEP_BYTES,
        b'["' + b"x" * STEP_BYTES,
    ],
)
def test_refusal_does_not_depend_on_parts(text: bytes) -> None:
    with pytest.raises(RefusedJson) as caught:
        read_in_parts(text, 8_192)
    assert str(caught.value) == refusal(text)


@given(st.binary(max_size=40) | st.text('[]{}",:\\u0a1 \n', max_size=60).map(str.encode))
def test_text_that_parsers_refuse_is_refused(text: bytes) -> None:
    try:
        expected = orjson.loads(text)
    except orjson.JSONDecodeError:
        refusal(text)
        return
    try:
        found = read(text)
    except RefusedJson as exc:
        why = str(exc)
    else:
        assert found == expected
        return
    assert why.startswith((bounded_json.HAS_NUL, bounded_json.REPEATS))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1_000, 50_000])
@pytest.mark.parametrize("space", ["", " ", "\n    "])
def test_list_of_text_may_be_long(count: int, space: str) -> None:
    items = [f"0x{number:040x}" for number in range(count)]
    text = f'{{"a": [{space}{f",{space}".join(map(json.dumps, items))}{space}], "b": 1}}'.encode()
    assert read(text) == {"a": items, "b": 1}


def test_list_may_have_other_values_between_its_runs() -> None:
    items: list[Any] = [*map(str, range(100)), None, "a\nb", *map(str, range(100)), True, 7]
    assert read(orjson.dumps({"x": [items]})) == {"x": [items]}
    assert refusal(orjson.dumps({"x": [*items, []]})) == bounded_json.MIXED


def test_long_lists_are_known_by_their_paths() -> None:
    many = [*map(str, range(40))]
    reader = JsonReader(orjson.dumps({"a": {"b": many}, "c": [None, many], "d": many[:3]}))
    assert reader.step()
    value = reader.value()
    assert {each.path for each in reader.long_lists} == {("a", "b"), ("c", 1)}
    reader.long_lists[0].show(1, 3)
    assert many[1:3] in (value["a"]["b"], value["c"][1])
    reader.long_lists[0].restore()
    assert value == {"a": {"b": many}, "c": [None, many], "d": many[:3]}


def test_bounds_are_exact() -> None:
    assert read(b"[%b0]" % (b"0," * (MOST_VALUES - 1)))
    assert refusal(b"[%b0]" % (b"0," * MOST_VALUES)) == bounded_json.TOO_MANY
    assert read(b"[" * MOST_CONTAINERS + b"]" * MOST_CONTAINERS)
    assert refusal(b"[" * (MOST_CONTAINERS + 1)) == bounded_json.TOO_MANY
    assert len(read(b'[%b"a"]' % (b'"a",' * MOST_STRINGS))) == MOST_STRINGS + 1
    assert refusal(b'[%b"a"]' % (b'"a",' * (MOST_STRINGS + 1))) == bounded_json.TOO_LONG
    assert read(b'"%b"' % (b"a" * (MOST_LONG_BYTES - 2)))
    assert refusal(b'"%b"' % (b"a" * (MOST_LONG_BYTES - 1))) == bounded_json.LONG_TEXT
    assert refusal(b"1" + b" " * MOST_OUTLINE_BYTES) == bounded_json.TOO_LARGE


@pytest.mark.parametrize("size", [STEP_BYTES - 3, STEP_BYTES - 2, STEP_BYTES - 1, STEP_BYTES, 3 * STEP_BYTES])
def test_string_longer_than_a_step_is_read_without_escapes_only(size: int) -> None:
    text = "a" * size
    assert read(orjson.dumps([text, text])) == [text, text]
    escaped = orjson.dumps(["\n" + text])
    if size + len('"\\n"') > STEP_BYTES:
        assert refusal(escaped) == bounded_json.LONG_ESCAPES
    else:
        assert read(escaped) == ["\n" + text]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b'["\\u0000"]', "0"),
        (b'"\\u0000"', "its text"),
        (b'{"\\u0000": 1}', "a name"),
        (b'{"a": {"b": [0, {"c\\u0000": 1}]}}', "a name in a.b.1"),
        (b'["a", "b\\\\\\u0000"]', "1"),
        (b'{"x": "\\u00000"}', "x"),
        (b'{"x": [%b"\\u0000"]}' % (b'"a",' * 100), "x.1"),
    ],
)
def test_nul_is_refused_in_names_and_values(text: bytes, where: str) -> None:
    assert refusal(text) == f"{bounded_json.HAS_NUL}, in {where}"


def test_backslash_before_u0000_is_not_nul() -> None:
    assert read(b'["\\\\u0000"]') == ["\\u0000"]


@pytest.mark.parametrize("text", [b'{"a":1,"a":1}', b'{"a":1,"\\u0061":1}', b'[{"x":{"":0,"b":1,"":2}}]'])
def test_repeated_name_is_refused(text: bytes) -> None:
    assert refusal(text) == bounded_json.REPEATS


def test_same_name_in_two_objects_is_not_repeated() -> None:
    assert read(b'{"a":{"a":"a:a"},"b":[{"a":1},{"a":2}]}')


def test_value_for_one_step_has_few_values() -> None:
    assert parse_bounded(b'{"a":[1,2]}') == {"a": [1, 2]}
    for text in (
        b"[%b0]" % (b"0," * bounded_json.MOST_VALUES_AT_ONCE),
        b"[" * 10_000,
        b'"%b"' % (b"a" * bounded_json.MOST_AT_ONCE),
        b"{",
    ):
        with pytest.raises(RefusedJson):
            parse_bounded(text)
