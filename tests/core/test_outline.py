"""Large calls read by their outline: never otherwise than in full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonrpc, outline
from proxy.core.jsonrpc import Malformed

LONG = "0x" + "ab" * 2 * outline.MOST_AROUND


def body_of(params: str, *, method: str = '"eth_sendRawTransaction"', id_: str = "7", more: str = "") -> bytes:
    return f'{{"jsonrpc":"2.0","id":{id_},"method":{method},"params":{params}{more}}}'.encode()


@pytest.mark.parametrize(
    "params",
    [
        f'["{LONG}"]',
        f'[{{"to":"0x01","data":"{LONG}"}},"latest"]',
        f'["{LONG}", 1e3 , [ ] ,"0x"]',
        f'{{"{LONG}":"0x"}}',
    ],
)
def test_long_strings_come_out_as_they_went_in(params: str) -> None:
    assert outline.read_call(body_of(params)) == ("eth_sendRawTransaction", params.encode(), b"7")


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
        body_of(f'["0x",[{"1," * 2 * outline.MOST_AROUND}1],"0x"]'),
        body_of("[" * 2000 + f'"{LONG}"' + "]" * 2000),
        b"[" + body_of(f'["{LONG}"]') + b"]",
        b"",
    ],
)
def test_what_is_not_plain_is_left_to_the_parser(body: bytes) -> None:
    assert outline.read_call(body) is None


TOKENS = st.sampled_from(
    [
        *("{", "}", "[", "]", ":", ",", '"', '""', "\\", '\\"', '"a"', "1", "null", " ", "\n", "é", "…", '"…"'),
        *('"jsonrpc"', '"2.0"', '"id"', '"method"', '"params"', '"eth_call"', f'"{LONG}"', LONG, f'"{LONG}é"'),
    ]
)


@given(st.lists(TOKENS, max_size=8), st.lists(TOKENS, max_size=8), st.sampled_from(["7", '"\\""', f'"{LONG}"']))
def test_both_ways_read_the_same(before: list[str], after: list[str], id_: str) -> None:
    params = "[" + "".join(before) + f'"{LONG}"' + "".join(after) + "]"
    for body in (body_of(params, id_=id_), body_of(f'["{LONG}"]', id_=id_, more="".join(after))):
        call = outline.read_call(body)
        if call is not None:
            assert call == jsonrpc.parse(body)


def test_a_bad_call_is_told_by_the_parser() -> None:
    body = body_of(f'"{LONG}"')
    assert outline.read_call(body) is None
    with pytest.raises(Malformed):
        jsonrpc.parse(body)
