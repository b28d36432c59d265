"""Large calls read by their outline: never otherwise than in full."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonrpc, large_envelope
from proxy.core.jsonrpc import MalformedCall

LONG = "0x" + "ab" * 2 * large_envelope.MOST_AROUND


def body_of(params: str, *, method: str = '"eth_sendRawTransaction"', id_: str = "7", more: str = "") -> bytes:
    return f'{{"jsonrpc":"2.0","id":{id_},"method":{method},"params":{params}{more}}}'.encode()


@pytest.mark.parametrize(
    "params",
    [
        f'["{LONG}"]',
        f'[{{"to":"0x01","data":"{LONG}"}},"latest"]',
        f'["{LONG}", 1e3 , [ ] ,"0x"]',
        f'[{{"{LONG}":"0x"}}]',
    ],
)
def test_long_strings_come_out_as_they_went_in(params: str) -> None:
    assert large_envelope.read_call(body_of(params)) == ("eth_sendRawTransaction", params.encode(), b"7")


@pytest.mark.parametrize(
    "body",
    [
        body_of(f'["{LONG}\n"]'),
        body_of(f'["{LONG}\\n"]'),
        body_of(f'["{LONG}é"]'),
        body_of(f'["{LONG}","…"]'),
        body_of(f'["{LONG}"]', id_=f'"{LONG}"'),
        body_of(f'["{LONG}"]', id_='"a\\"b"'),
        body_of(f'["{LONG}"]', method=f'"{LONG}"'),
        body_of(f'["{LONG}"]', more=f',"{LONG}":1'),
        body_of(f'["{LONG}"'),
        body_of(f'["{LONG}]'),
        body_of(f'"{LONG}"'),
        body_of("[" + '"0x01",' * 1000 + f'"{LONG}"]'),
        body_of(f'["{LONG}","{LONG}"]'),
        body_of(f'["0x",[{"1," * 2 * large_envelope.MOST_AROUND}1],"0x"]'),
        body_of("[" * 2000 + f'"{LONG}"' + "]" * 2000),
        b"[" + body_of(f'["{LONG}"]') + b"]",
        b"",
    ],
)
def test_unusual_call_is_left_to_the_parser(body: bytes) -> None:
    assert large_envelope.read_call(body) is None


TEXT = st.text(st.sampled_from('ab"\\\n\x7fé…{}[],:'), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.just(LONG),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES, VALUES, st.booleans(), st.sampled_from(["7", '"a"', '"\\""', f'"{LONG}"']))
def test_good_calls_are_read_as_by_the_parser(before: object, after: object, ascii_only: bool, id_: str) -> None:
    params = json.dumps([before, LONG, {"data": after}], ensure_ascii=ascii_only)
    body = body_of(params, id_=id_)
    call = large_envelope.read_call(body)
    is_plain = params.isascii() and "\\" not in params + id_ and params.count(LONG) == 1 and LONG not in id_
    assert (call is not None) == is_plain
    assert call is None or call == jsonrpc.parse(body)


@given(st.data())
def test_bytes_that_were_changed_are_never_read_otherwise(data: st.DataObject) -> None:
    """Near the ends of the string and anywhere around it: one byte put in, or one taken out."""
    body = body_of(f'[{{"to":"0x01","data":"{LONG}"}},"latest"]')
    first, last = body.index(b"0xab"), body.rindex(b"ab") + 2
    at = data.draw(st.integers(0, first + 4) | st.integers(last - 4, len(body)))
    put_in = data.draw(st.sampled_from([b"", b'"', b"\\", b'\\"', b"\n", b"\xff", b"[", b"}", b",", b'","id":8,"x":"']))
    changed = body[:at] + put_in + body[at + (not put_in) :]
    call = large_envelope.read_call(changed)
    if call is not None:
        assert call == jsonrpc.parse(changed)


def test_bad_call_is_refused_by_the_parser() -> None:
    body = body_of(f'"{LONG}"')
    assert large_envelope.read_call(body) is None
    with pytest.raises(MalformedCall):
        jsonrpc.parse(body)
