"""Log queries: their ranges read, split, rebuilt and joined."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm import log_range
from proxy.chains.evm.log_range import LogRange

HEAD = 5000


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ('[{"fromBlock":"0x1","toBlock":"0xa"}]', (1, 10)),
        ('[{"toBlock":"latest","fromBlock":"0x1"}]', (1, HEAD)),
        ('[{"fromBlock":"earliest","toBlock":"0x5"}]', (0, 5)),
        ('[{"fromBlock":"0x1"}]', (1, HEAD)),
        ('[{"fromBlock":null,"toBlock":null}]', (HEAD, HEAD)),
        ('[{"fromBlock":"l\\u0061test"}]', (HEAD, HEAD)),
        ("[{}]", (HEAD, HEAD)),
        ('[{"fromBlock":"0x0001","toBlock":"0x1"}]', (1, 1)),
        ('[{"fromBlock":"0xa","toBlock":"0x1"}]', None),
        ('[{"fromBlock":"0x1","toBlock":"pending"}]', None),
        ('[{"fromBlock":"0x1","toBlock":"finalized"}]', None),
        ('[{"fromBlock":1,"toBlock":"0x5"}]', None),
        ('[{"fromBlock":"1","toBlock":"0x5"}]', None),
        ('[{"blockHash":"0xab"}]', None),
        ('[{"fromBlock":"0x1","toBlock":"0x5","TOBLOCK":"0x9"}]', None),
        ('[{"fromBlock":"0x1","bloc\u212ahash":"0x9"}]', None),
        ("[]", None),
        ("[{},{}]", None),
        ('["0x1"]', None),
        ("", None),
        ("[" * 5000, None),
    ],
)
def test_range_is_read_where_it_is_one_of_numbers(params: str, expected: tuple[int, int] | None) -> None:
    found = log_range.parse(params.encode(), HEAD)
    assert (found and (found.first, found.last)) == expected


def test_other_members_of_the_filter_keep_their_bytes() -> None:
    params = b'[{"address": ["0xAb", "0xCd"],"fromBlock":"0x1","topics":[null, ["0x1"], 1.10],"toBlock":"0x5","x":{"a" : 1}}]'
    found = log_range.parse(params, HEAD)
    assert found is not None
    assert found.part(2, 3).params() == (
        b'[{"fromBlock":"0x2","toBlock":"0x3","address":["0xAb", "0xCd"],"topics":[null, ["0x1"], 1.10],"x":{"a" : 1}}]'
    )
    assert LogRange(2, 3).params() == b'[{"fromBlock":"0x2","toBlock":"0x3"}]'


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(-1, 300))
def test_parts_cover_every_block_once_and_in_order(first: int, more: int, size: int) -> None:
    whole = LogRange(first, first + more, b'"a":1')
    for parts in (list(whole.chunks(size)), list(whole.halves() or (whole,))):
        assert [part.first for part in parts] == [first, *(part.last + 1 for part in parts[:-1])]
        assert parts[-1].last == whole.last
        assert {part.rest for part in parts} == {whole.rest}
    assert all(part.blocks <= max(size, 1) for part in whole.chunks(size))


def test_halves_are_as_equal_as_can_be_and_a_single_block_has_none() -> None:
    assert LogRange(1, 4).halves() == (LogRange(1, 2), LogRange(3, 4))
    assert LogRange(1, 2).halves() == (LogRange(1, 1), LogRange(2, 2))
    assert LogRange(7, 7).halves() is None


def test_chunks_of_an_endless_range_cost_nothing_until_taken() -> None:
    assert next(LogRange(0, 2**62).chunks(10)) == LogRange(0, 9)


@given(st.lists(st.lists(st.dictionaries(st.text(), st.text() | st.integers()), max_size=3)), st.booleans())
def test_joined_results_are_the_result_of_the_whole(parts: list[list[object]], spaced: bool) -> None:
    raws = [json.dumps(part, indent=1 if spaced else None).encode() for part in parts]
    assert json.loads(log_range.merge(raws)) == [log for part in parts for log in part]


def test_joined_logs_keep_their_bytes() -> None:
    assert log_range.merge([b'[{"n":1.10}]', b" [ ] ", b"[]", b'[ {"b" : 2},3 ]']) == b'[{"n":1.10},{"b" : 2},3]'
    assert log_range.merge([]) == b"[]"


@pytest.mark.parametrize("broken", [b"null", b"", b"[", b"{}", b'"0x"'])
def test_part_that_is_no_array_spoils_the_whole(broken: bytes) -> None:
    with pytest.raises(ValueError, match="no array"):
        log_range.merge([b"[1]", broken])


@pytest.mark.parametrize(
    ("message", "pair", "blocks"),
    [
        ("Log response size exceeded. You can make eth_getLogs requests with up to a 2K block range and no limit on the "
         "response size, or you can request any block range with a cap of 10K logs in the response. Based on your "
         "parameters and the response size limit, this block range should work: [0xc5dc00, 0xc614a7]",
         (0xC5DC00, 0xC614A7), 0xC614A7 - 0xC5DC00 + 1),
        ("query returned more than 10000 results. Try with this block range [0x1, 0x7D0].", (1, 2000), 2000),
        ("query exceeds max results 20000, retry with the range 3600741-3620740", (3600741, 3620740), 20000),
        ("You can make eth_getLogs requests with up to a 2K block range and no limit on the response size", None, 2000),
        ("Under the Free tier plan, you can make eth_getLogs requests with up to a 10 block range.", None, 10),
        ("eth_getLogs is limited to a 10,000 range", None, 10_000),
        ("eth_getLogs is limited to a 10,000 blocks range", None, 10_000),
        ("block range is too wide, max 500", None, 500),
        ("exceed maximum block range: 50000", None, 50_000),
        ("block range too large, max is 1024 blocks", None, 1024),
        ("maximum allowed range is 2000", None, 2000),
        ("Block range limit exceeded. range limit of 1000", None, 1000),
        ("requested range of more than 5000 blocks", None, 5000),
        ("query returned more than 10000 results", None, None),
        ("response is too big, max 10000 logs", None, None),
        ("block range is too wide", None, None),
        ("this block range should work: [0x9, 0x1]", None, None),
        ("max 0", None, None),
        ("", None, None),
    ],
)  # fmt: skip
def test_refusals_say_what_would_work(message: str, pair: tuple[int, int] | None, blocks: int | None) -> None:
    assert log_range.suggested(message) == pair
    assert log_range.allowed_blocks(message) == blocks


@pytest.mark.parametrize(
    ("asked", "message", "expected"),
    [
        (LogRange(1, 1000, b"r"), "up to a 10 block range", LogRange(1, 10, b"r")),
        (LogRange(1, 1000, b"r"), "too much", LogRange(1, 500, b"r")),
        (LogRange(1, 1000, b"r"), "max 5000", LogRange(1, 500, b"r")),
        (LogRange(1, 1000, b"r"), "this block range should work: [0x0, 0x9]", LogRange(1, 10, b"r")),
        (LogRange(5, 5, b"r"), "up to a 10 block range", None),
    ],
)
def test_refused_range_is_narrowed_and_never_leaves_what_was_asked(
    asked: LogRange, message: str, expected: LogRange | None
) -> None:
    assert log_range.narrowed(asked, message) == expected


@given(st.text(), st.integers(0, 2**40), st.integers(0, 2**20))
def test_narrowed_range_is_smaller_and_inside(message: str, first: int, more: int) -> None:
    asked = LogRange(first, first + more)
    part = log_range.narrowed(asked, message)
    assert part is None if more == 0 else part is not None and first == part.first <= part.last < asked.last


def test_our_refusal_names_a_range_in_data_and_in_the_phrase_that_indexers_read() -> None:
    error = json.loads(log_range.refusal(16, 1024))
    assert error["code"] == -32602
    assert error["data"] == {"suggested_from": "0x10", "suggested_to": "0x400"}
    assert "this block range should work: [0x10, 0x400]" in error["message"]
    assert log_range.suggested(error["message"]) == (16, 1024)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b'"0x0"', 0), (b'"0x00ff"', 255), (b'"0XFF"', 255), (b'"0x"', None), (b'"0x-1"', None), (b'"0x1_1"', None),
     (b'"0x 1"', None), (b'"0xg"', None), (b'"12"', None), (b"12", None), (b"", None), (b"null", None),
     (b'"0x' + b"f" * 64 + b'"', 2**256 - 1), (b'"0x' + b"f" * 65 + b'"', None)],
)  # fmt: skip
def test_quantity_reads_hex_and_nothing_else(raw: bytes, expected: int | None) -> None:
    assert log_range.quantity(raw) == expected


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ("0x0", "0xfffffffffffffff", '{"fromBlock":"0x0","toBlock":"latest","address":"0x1"}'),
        ("0x64", "0x84d", '{"fromBlock":"0x64","toBlock":"latest","address":"0x1"}'),
        ("0xffffffff", "0xffffffffff", '{"fromBlock":"0xffffffff","toBlock":"0x1000003e7","address":"0x1"}'),
        ("0x0", "0x84c", None),
        ("0x0", "latest", None),
        ("0x5", "0x1", None),
        ("latest", "pending", None),
    ],
)
def test_range_far_beyond_the_head_ends_near_it(first: str, last: str, expected: str | None) -> None:
    head = 2124 - 1000
    params = f'[{{"fromBlock":"{first}","toBlock":"{last}","address":"0x1"}}]'.encode()
    assert log_range.within_head(params, head) == (params if expected is None else f"[{expected}]".encode())
    assert log_range.within_head(params, 0) == params
