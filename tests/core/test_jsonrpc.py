"""The JSON-RPC envelope: the specification's own examples, and what hostile clients send."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import jsonrpc
from proxy.core.batch_reader import read_batch
from proxy.core.jsonrpc import (
    INVALID_REQUEST,
    MAX_ID_BYTES,
    MOST_SEARCHED,
    MOST_SPACE,
    PARSE_ERROR,
    READ_WHOLE,
    Dialect,
    MalformedCall,
    envelope_reader,
    is_batch,
    parse,
    read_replies,
    read_reply,
)

CALL = b'{"jsonrpc":"2.0","method":"eth_call","id":1}'

# The largest batch in these tests.
MAX_BATCH = 100


def code_of(body: bytes) -> int:
    with pytest.raises(MalformedCall) as caught:
        parse(body)
    return caught.value.code


def code_of_batch(body: bytes) -> int:
    with pytest.raises(MalformedCall) as caught:
        read_batch(body, MAX_BATCH)
    return caught.value.code


# https://www.jsonrpc.org/specification, section 7


@pytest.mark.parametrize(
    ("body", "method", "params", "id"),
    [
        (b'{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}', "subtract", b"[42, 23]", b"1"),
        (b'{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}', "subtract", b"[23, 42]", b"2"),
        (
            b'{"jsonrpc": "2.0", "method": "subtract", "params": [23, {"minuend": 42}], "id": 3}',
            *("subtract", b'[23, {"minuend": 42}]', b"3"),
        ),
        (b'{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', "update", b"[1,2,3,4,5]", b""),
        (b'{"jsonrpc": "2.0", "method": "foobar"}', "foobar", b"[]", b""),
        (b'{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', "foobar", b"[]", b'"1"'),
    ],
)
def test_calls_of_the_specification_are_read(body: bytes, method: str, params: bytes, id: bytes) -> None:  # noqa: A002
    assert parse(body) == (method, params, id)


def test_bytes_that_are_no_json_are_a_parse_error() -> None:
    assert code_of(b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]') == PARSE_ERROR


def test_json_that_is_no_call_is_an_invalid_request() -> None:
    assert code_of(b'{"jsonrpc": "2.0", "method": 1, "params": "bar"}') == INVALID_REQUEST


def test_batch_that_is_no_json_is_a_parse_error() -> None:
    body = b'[{"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},{"jsonrpc": "2.0", "method"]'
    assert code_of_batch(body) == PARSE_ERROR
    assert code_of_batch(b"[") == PARSE_ERROR


def test_empty_batch_is_an_invalid_request() -> None:
    assert code_of_batch(b"[]") == INVALID_REQUEST


@pytest.mark.parametrize("count", [1, 3])
def test_items_that_are_no_calls_are_answered_each(count: int) -> None:
    items = read_batch(b"[%b]" % b",".join([b"1"] * count), MAX_BATCH)
    assert [item.code for item in items if isinstance(item, MalformedCall)] == [INVALID_REQUEST] * count


def test_batch_of_the_specification_keeps_order_and_separates_good_from_bad() -> None:
    items = read_batch(
        b"""[
        {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
        {"foo": "boo"},
        {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"}
    ]""",
        MAX_BATCH,
    )
    assert items[0] == ("sum", b"[1,2,4]", b'"1"')
    assert items[1] == ("notify_hello", b"[7]", b"")
    assert isinstance(items[2], MalformedCall)
    assert (items[2].code, items[2].id) == (INVALID_REQUEST, b"null")
    # No method that we serve has named params.
    assert isinstance(items[3], MalformedCall)
    assert (items[3].code, items[3].id) == (INVALID_REQUEST, b'"5"')


# Beyond the specification


@pytest.mark.parametrize(
    "extra",
    [
        b'"METHOD":"eth_sendRawTransaction"',
        b'"Method":"eth_sendRawTransaction"',
        b'"method ":"eth_sendRawTransaction"',
        b'"Params":[]',
        b'"ID":2',
        b'"\xe2\x84\xaaey":1',
        b'"extra":1',
    ],
)
def test_member_under_another_name_is_refused(extra: bytes) -> None:
    body = CALL[:-1] + b"," + extra + b"}"
    assert code_of(body) == INVALID_REQUEST
    assert isinstance(read_batch(b"[%b]" % body, MAX_BATCH)[0], MalformedCall)


def test_doubled_member_never_becomes_two_in_what_is_sent_on() -> None:
    body = b'{"jsonrpc":"2.0","method":"eth_call","method":"eth_sendRawTransaction","id":1}'
    try:
        method, _, _ = parse(body)
    except MalformedCall:
        return
    assert jsonrpc.request_tail(method).count(b'"method"') == 1


@pytest.mark.parametrize(
    "id",
    [
        *(b"0", b"-1", b"18446744073709551616", b"1" * 100, b"1.50e3", b"1e999", b"null"),
        *(b'""', b'"a\\u0000b"', b'"\\"}"', '"héllo"'.encode(), b'"%b"' % (b"x" * (MAX_ID_BYTES - 2))),
    ],
)
def test_id_comes_back_byte_for_byte(id: bytes) -> None:  # noqa: A002
    assert parse(b'{"jsonrpc":"2.0","method":"m","id":%b}' % id)[2] == id


@pytest.mark.parametrize("id", [b"true", b"[1]", b"{}", b'"%b"' % (b"x" * (MAX_ID_BYTES - 1)), b"1" * 10_000])
def test_id_that_cannot_be_echoed_is_refused_under_null(id: bytes) -> None:  # noqa: A002
    with pytest.raises(MalformedCall) as caught:
        parse(b'{"jsonrpc":"2.0","method":"m","id":%b}' % id)
    assert (caught.value.code, caught.value.id) == (INVALID_REQUEST, b"null")


@pytest.mark.parametrize("params", [b"[115792089237316195423570985008687907853269984665640564039457584007913129639935]",
                                    b"[0.1000000000000000055511151231257827]", b'[{"a":1,"b":[]}, "\\u00e9"]'])  # fmt: skip
def test_params_travel_as_the_bytes_they_were(params: bytes) -> None:
    assert parse(b'{"jsonrpc":"2.0","method":"m","params":%b,"id":1}' % params)[1] == params


@pytest.mark.parametrize("params", [b"{}", b'{"a":[]}', b"1", b'"text"', b"true", b"false"])
def test_params_other_than_an_array_are_refused(params: bytes) -> None:
    assert code_of(b'{"jsonrpc":"2.0","method":"m","params":%b,"id":1}' % params) == INVALID_REQUEST


def test_null_params_are_no_params_as_in_geth() -> None:
    assert parse(b'{"jsonrpc":"2.0","method":"m","params":null,"id":1}')[1] == b"[]"


# An upstream's reply


@pytest.mark.parametrize("head", [b'"id":null,', b""])
def test_error_without_an_id_is_the_reply_to_our_call(head: bytes) -> None:
    error = b'{"code":-32600,"message":"Invalid Request"}'
    assert bytes(read_reply(b'{"jsonrpc":"2.0",%b"error":%b}' % (head, error), b"7").error) == error


@pytest.mark.parametrize("body", [b'{"id":8,"error":{"code":1}}', b'{"id":null,"result":1}', b'{"result":"0x1"}'])
def test_reply_under_another_id_is_not_ours(body: bytes) -> None:
    with pytest.raises(ValueError, match="another call"):
        read_reply(body, b"7")


def test_errors_without_an_id_in_a_batch_are_found_under_null() -> None:
    error = b'{"id":null,"error":{"code":-32600,"message":"no"}}'
    found = read_replies(b'[{"id":1,"result":2},%b,%b]' % (error, error))
    assert set(found) == {b"1", b"null"}
    with pytest.raises(ValueError, match="two replies"):
        read_replies(b'[{"id":1,"result":2},{"id":1,"result":2},%b]' % error)


@pytest.mark.parametrize("method", [b'""', b'"%b"' % (b"m" * 129), '"é"'.encode(), b"null", b'["m"]'])
def test_method_is_a_short_ascii_name(method: bytes) -> None:
    assert code_of(b'{"jsonrpc":"2.0","method":%b,"id":1}' % method) == INVALID_REQUEST


@pytest.mark.parametrize("version", [b'"1.0"', b"2.0", b"null", b'"2.0 "'])
def test_version_is_exactly_two(version: bytes) -> None:
    assert code_of(b'{"jsonrpc":%b,"method":"m","id":1}' % version) == INVALID_REQUEST
    assert code_of(b'{"method":"m","id":1}') == INVALID_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b'{"jsonrpc":"2.0","method":"m","params":["\xff"],"id":1}',
        b'{"jsonrpc":"2.0","method":"m","params":["\xed\xa0\x80"],"id":1}',
        b'{"jsonrpc":"2.0","method":"m","id":"\xc0\xaf"}',
        b'{"jsonrpc":"2.0","method":"\xff","id":1}',
    ],
)
def test_invalid_utf8_goes_neither_on_nor_back(body: bytes) -> None:
    with pytest.raises(MalformedCall):
        parse(body)
    with contextlib.suppress(MalformedCall):
        assert isinstance(read_batch(b"[%b]" % body, MAX_BATCH)[0], MalformedCall)


@pytest.mark.parametrize("opener", [b"[", b'{"a":'])
def test_deep_nesting_is_refused_and_not_followed(opener: bytes) -> None:
    assert code_of(b'{"jsonrpc":"2.0","method":"m","id":1,"params":' + opener * 200_000) == PARSE_ERROR
    assert code_of_batch(b"[" + opener * 200_000) == PARSE_ERROR


@pytest.mark.parametrize("count", [1, MAX_BATCH - 1, MAX_BATCH])
def test_batch_up_to_the_limit_is_read(count: int) -> None:
    assert len(read_batch(b"[%b]" % b",".join([CALL] * count), MAX_BATCH)) == count


@pytest.mark.parametrize("item", [CALL, b"1"])
def test_batch_beyond_the_limit_is_refused_whole(item: bytes) -> None:
    assert code_of_batch(b"[%b]" % b",".join([item] * (MAX_BATCH + 1))) == INVALID_REQUEST


@pytest.mark.parametrize("body", [b"", b" ", b"\xef\xbb\xbf" + CALL, CALL + b"x", CALL + CALL, b"{", b"nul", b"\0"])
def test_noise_around_a_call_is_a_parse_error(body: bytes) -> None:
    assert code_of(body) == PARSE_ERROR


@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_malformed(body: bytes) -> None:
    with contextlib.suppress(MalformedCall):
        parse(body)
    with contextlib.suppress(MalformedCall):
        read_batch(body, MAX_BATCH)


# Repeated members

MEMBERS = {"jsonrpc": '"2.0"', "method": '"eth_call"', "params": '[{"id":1,"id":2,"params":[]}]', "id": "7"}
spaces = st.sampled_from(["", " ", "\n", "  \t "])


@st.composite
def member_texts(draw: st.DrawFn, names: Sequence[str], *, escapes: bool = True) -> str:
    """A call with these members in any order, spacing and spelling."""
    parts = []
    for name in draw(st.permutations(names)):
        spellings = [name, f"\\u{ord(name[0]):04x}{name[1:]}"] if escapes else [name]
        spelled = draw(st.sampled_from(spellings))
        gaps = [draw(spaces) for _ in range(4)]
        parts.append(f'{gaps[0]}"{spelled}"{gaps[1]}:{gaps[2]}{MEMBERS[name]}{gaps[3]}')
    return "{" + ",".join(parts) + "}"


@given(
    st.sampled_from([["method", "jsonrpc", *more] for more in (["id"], ["params"], ["id", "params"], [])]), st.data()
)
def test_call_without_a_repeated_member_is_accepted_in_any_spelling(names: list[str], data: st.DataObject) -> None:
    body = data.draw(member_texts(names)).encode()
    params = MEMBERS["params"].encode() if "params" in names else b"[]"
    expected = ("eth_call", params, b"7" if "id" in names else b"")
    assert parse(body) == expected
    assert read_batch(b"[%b, %b]" % (body, body), MAX_BATCH) == [expected, expected]


@given(st.sampled_from(["id", "params", "method", "jsonrpc"]), st.sampled_from([["id"], ["params"], []]), st.data())
def test_call_with_a_repeated_member_is_an_invalid_request(twice: str, more: list[str], data: st.DataObject) -> None:
    names = ["method", "jsonrpc", twice, *more, *([twice] if twice in ("id", "params") else [])]
    body = data.draw(member_texts(names)).encode()
    with pytest.raises(MalformedCall) as refused:
        parse(body)
    assert refused.value.code == INVALID_REQUEST
    good = data.draw(member_texts(["method", "jsonrpc", "id"])).encode()
    first, second, third = read_batch(b"[%b,%b,%b]" % (good, body, good), MAX_BATCH)
    assert isinstance(second, MalformedCall)
    assert first == third == ("eth_call", b"[]", b"7")


OLD_MEMBERS = {"jsonrpc": '"1.0"', "version": '"1.1"', "method": '"m"', "params": "[]", "id": "1"}


@given(st.lists(st.sampled_from([*OLD_MEMBERS]), min_size=1, max_size=8).filter(lambda names: "method" in names))
def test_hot_path_leaves_calls_of_old_versions_with_a_repeated_member(names: list[str]) -> None:
    body = "{" + ",".join(f'"{name}":{OLD_MEMBERS[name]}' for name in names) + "}"
    read = envelope_reader(Dialect(old_versions=True))
    if len(names) > len({*names}):
        with pytest.raises(msgspec.DecodeError):
            read(body.encode())
    else:
        assert read(body.encode()).method == "m"


# Large calls, which are read in time and memory that follow their size, whatever they contain.

LARGE = MEMBERS["params"].removesuffix("]") + ', "\\n' + " a" * MOST_SEARCHED + '"]'


@given(st.sampled_from([["id"], []]), st.data())
def test_large_call_is_accepted_in_any_spacing(more: list[str], data: st.DataObject) -> None:
    text = data.draw(member_texts(["method", "jsonrpc", "params", *more], escapes=False))
    body = text.replace(MEMBERS["params"], LARGE).encode()
    assert parse(body) == ("eth_call", LARGE.encode(), b"7" if more else b"")


@given(st.sampled_from(["id", "params", "method", "jsonrpc"]), st.data())
def test_large_call_with_a_repeated_member_is_an_invalid_request(twice: str, data: st.DataObject) -> None:
    text = data.draw(member_texts(["method", "jsonrpc", "params", "id", twice]))
    for count in (1, -1):
        with pytest.raises(MalformedCall) as refused:
            parse(text.replace(MEMBERS["params"], LARGE, count).encode())
        assert refused.value.code == INVALID_REQUEST


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"%d":1' % number for number in range(20_000)) + b"}",
        CALL[:-1].replace(b"{", b'{        "id":7,', 1) + b',"params":["\\n"' + b",10" * 60_000 + b"]}",
        CALL[:-1].replace(b"{", b'{        "id":7,', 1) + b',"params":[' + b'{"id":1},' * 20_000 + b"1]}",
    ],
    ids=["members", "numbers", "objects"],
)
def test_large_body_is_read_without_an_object_for_each_of_its_values(body: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(MalformedCall):
            parse(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * len(body)


def test_batch_follows_little_space() -> None:
    assert is_batch(b"[]")
    assert is_batch(b" \r\n\t[]")
    assert not is_batch(b" " * (MOST_SPACE + 1) + b"[]")


def test_lone_object_of_a_service_is_an_array_with_one_item() -> None:
    """Only for its methods: params of all others are arrays."""
    dialect, body = Dialect(lone_object="ankr_"), b'{"jsonrpc":"2.0","id":1,"method":"%b","params":%b}'
    assert parse(body % (b"ankr_x", b'{"a": 1}'), dialect=dialect) == ("ankr_x", b'[{"a": 1}]', b"1")
    assert parse(body % (b"ankr_x", b"[7]"), dialect=dialect) == ("ankr_x", b"[7]", b"1")
    for method, params, given_dialect in (
        (b"eth_call", b"{}", dialect),
        (b"ankr_x", b"{}", jsonrpc.STRICT),
        (b"ankr_x", b"7", dialect),
    ):
        with pytest.raises(MalformedCall) as caught:
            parse(body % (method, params), dialect=given_dialect)
        assert caught.value.code == INVALID_REQUEST


_LARGE = b'["' + b"x" * READ_WHOLE + b'"]'


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"jsonrpc":"2.0","id":7,"result":%b}', _LARGE),
        (b'{"jsonrpc":"2.0","id":7,"result":%b}\r\n', _LARGE),
        # Read whole: the result comes first, or has spaces before it, or many after it.
        (b'{"id":7,"result":%b,"jsonrpc":"2.0"}', _LARGE),
        (b'{"jsonrpc":"2.0","id":7,"result": %b}', _LARGE),
        (b'{"jsonrpc":"2.0","id":7,"result":%b}' + b" " * 9, _LARGE),
    ],
)
def test_large_reply_is_known_by_its_beginning_and_its_end(body: bytes, result: bytes) -> None:
    assert bytes(read_reply(body % result, b"7").result).strip() == result


@pytest.mark.parametrize(
    "body",
    [
        b'{"jsonrpc":"2.0","id":8,"result":%b}' % _LARGE,
        b'{"jsonrpc":"2.0","id":7,"result":%b' % _LARGE,
        b'{"jsonrpc":"2.0","id":7,"result":null,"id":%b}' % _LARGE,
        b'{"jsonrpc":"2.0","id":7,"result":"%b}' % (b"\xff" * READ_WHOLE),
    ],
)
def test_large_reply_to_another_call_or_cut_off_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="reply"):
        read_reply(body, b"7")


def test_large_error_is_read_whole() -> None:
    error = b'{"code":3,"message":"reverted","data":"%b"}' % (b"ab" * READ_WHOLE)
    reply = read_reply(b'{"jsonrpc":"2.0","id":7,"result":null,"error":%b}' % error, b"7")
    assert bytes(reply.error) == error
