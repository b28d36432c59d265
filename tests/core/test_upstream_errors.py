"""Classification of upstream errors. The texts are those that clients and vendors send."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import upstream_errors


def error(code: object, message: object, **more: object) -> bytes:
    return json.dumps({"code": code, "message": message, **more}).encode()


def translate(raw: bytes, *, ours: bool = True) -> bytes:
    return upstream_errors.translate(raw, upstream_errors.classify(raw), in_our_codes=ours)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("revert", 3, "execution reverted: ERC20: transfer amount exceeds balance"),
        ("revert", -32000, "execution reverted"),
        ("revert", -32015, "VM execution error."),
        ("revert", -32603, "VM Exception while processing transaction: revert Unauthorized"),
        ("revert", -32003, "transaction: revert"),
        ("revert", -32002, "Transaction simulation failed: Blockhash not found"),
        ("already_known", -32000, "already known"),
        ("already_known", -32003, "known transaction: 0xabc"),
        ("already_known", -32010, "AlreadyKnown"),
        ("already_known", -32010, "Transaction with the same hash was already imported."),
        ("nonce_too_low", -32000, "nonce too low: next nonce 5, tx nonce 4"),
        ("nonce_too_low", -32003, "nonce too low"),
        ("underpriced", -32000, "replacement transaction underpriced"),
        ("underpriced", -32000, "max fee per gas less than block base fee: address 0x1"),
        ("rejected", -32000, "insufficient funds for gas * price + value"),
        ("rejected", -32003, "whatever the pool dislikes"),
        ("range_too_large", -32602, "Log response size exceeded. You can make eth_getLogs requests with up to a 2K block "
         "range. Based on your parameters, this block range should work: [0x1, 0x7d0]"),
        ("range_too_large", -32600, "Under the Free tier plan, you can make eth_getLogs requests with up to a 10 block range."),
        ("range_too_large", -32005, "query returned more than 10000 results. Try with this block range [0x1, 0x2]."),
        ("range_too_large", -32614, "eth_getLogs is limited to a 10,000 range"),
        ("range_too_large", -32000, "block range is too wide"),
        ("range_too_large", -32602, "query exceeds max results 20000, retry with the range 1-2"),
        ("range_too_large", -32008, "Response is too big"),
        ("range_too_large", -32000, "exceed maximum block range: 50000"),
        ("range_too_large", -32000, "Query timeout exceeded. Consider reducing your block range."),
        ("rate_limited", 429, "Your app has exceeded its compute units per second capacity."),
        ("rate_limited", -32005, "daily request count exceeded, request rate limited"),
        ("rate_limited", -32005, "limit exceeded"),
        ("rate_limited", -32005, "something else"),
        ("rate_limited", -32007, "50/second request limit reached - reduce calls per second or upgrade your account"),
        ("rate_limited", -32016, "over rate limit"),
        ("rate_limited", -32097, "Too many requests"),
        ("missing_data", -32000, "missing trie node 0abc (path ) state 0xdef is not available"),
        ("missing_data", -32000, "header not found"),
        ("missing_data", -32602, "block range extends beyond current head block"),
        ("missing_data", -32000, "Received invalid block tag 31. Latest block number is 30"),
        ("missing_data", -32001, "block not found: 0x10"),
        ("missing_data", -32014, "no such thing"),
        ("missing_data", -32000, "required historical state unavailable (reexec=128)"),
        ("missing_data", 4444, "pruned history unavailable"),
        ("missing_data", -32602, "Block with such an ID is pruned; the first retained block is 5"),
        ("missing_data", -32000, "cannot query unfinalized data"),
        ("missing_data", -32004, "Block not available for slot 5"),
        ("missing_data", -32009, "Slot 5 was not found, or missing in long-term storage"),
        ("missing_data", -32016, "Minimum context slot has not been reached"),
        ("invalid", -32007, "Slot 5 was skipped, or missing due to ledger jump to recent snapshot"),
        ("server", -32005, "Node is behind by 42 slots"),
        ("timeout", -32000, "execution timeout"),
        ("timeout", -32002, "request timed out"),
        ("timeout", -32603, "context deadline exceeded"),
        ("timeout", -32015, ""),
        ("unauthorized", -32600, "Must be authenticated!"),
        ("unauthorized", -32000, "invalid api key"),
        ("unsupported", -32601, "the method trace_block does not exist/is not available"),
        ("unsupported", -32601, ""),
        ("unsupported", -32000, "Method debug_traceCall is not supported"),
        ("unsupported", -32004, "nope"),
        ("unsupported", -32600, "rpc method is not whitelisted"),
        ("invalid", -32602, "missing value for required argument 0"),
        ("invalid", -32602, "invalid argument 0: hex string without 0x prefix"),
        ("invalid", -32000, "gas required exceeds allowance (0)"),
        ("invalid", -32700, "bad"),
        ("server", -32603, "Internal error"),
        ("server", -32000, "service unavailable"),
        ("server", 502, "Bad Gateway"),
        ("unknown", -32000, "the sequencer has gone fishing"),
        ("unknown", 1234, ""),
    ],
)  # fmt: skip
def test_errors_are_classified_by_code_and_phrase(kind: str, code: int, message: str) -> None:
    verdict = upstream_errors.classify(error(code, message))
    assert (verdict.kind, verdict.code, verdict.message) == (kind, code, message)


@pytest.mark.parametrize(
    ("retry_elsewhere", "blame", "kinds"),
    [
        (False, False, "revert invalid already_known nonce_too_low underpriced rejected range_too_large unknown"),
        (True, False, "missing_data unsupported"),
        (True, True, "rate_limited unauthorized timeout server"),
    ],
)
def test_kinds_decide_retry_and_blame(retry_elsewhere: bool, blame: bool, kinds: str) -> None:
    for kind in kinds.split():
        meaning = upstream_errors.KINDS[kind]  # type: ignore[index]
        assert (meaning.retry_elsewhere, meaning.blame) == (retry_elsewhere, blame)


def test_contract_cannot_pass_for_a_failing_upstream() -> None:
    for words in ("too many requests", "missing trie node", "already known", "unauthorized"):
        assert upstream_errors.classify(error(3, f"execution reverted: {words}")).kind == "revert"
        assert upstream_errors.classify(error(-32000, f"execution reverted: {words}", data=words)).kind == "revert"
        assert upstream_errors.classify(error(-32000, "odd", data=words)).kind == "unknown"


@pytest.mark.parametrize("words", ["too many requests", "unauthorized", "timeout", "internal error", "node is behind"])
def test_caller_cannot_pass_for_a_failing_upstream(words: str) -> None:
    assert upstream_errors.classify(error(-32602, f'Invalid value "{words}" supplied to : ADDRESS')).kind == "invalid"


@pytest.mark.parametrize("broken", [b"", b"[]", b'"text"', b"5", b'{"code":{}}', b"{" * 5000])
def test_malformed_error_object_counts_against_the_upstream(broken: bytes) -> None:
    verdict = upstream_errors.classify(broken)
    assert (verdict.kind, verdict.retry_elsewhere, verdict.blame) == ("server", True, True)
    assert json.loads(translate(broken)) == {"code": -32603, "message": "the upstream failed"}


@pytest.mark.parametrize(("sent", "read"), [("-32005", -32005), ("x", 0), (None, 0), (-32005.0, -32005), (1e400, 0)])
def test_codes_of_other_types_are_read(sent: object, read: int) -> None:
    assert upstream_errors.classify(error(sent, "m").replace(b"Infinity", b"1e308")).code in (read, int(1e308))


@given(st.binary() | st.builds(error, st.integers() | st.text(), st.text() | st.none()))
def test_no_bytes_make_it_raise(raw: bytes) -> None:
    upstream_errors.classify(raw)
    translate(raw)
    translate(raw, ours=False)


def test_long_message_costs_no_more_than_a_short_one() -> None:
    assert upstream_errors.classify(error(-32000, "method " * 200_000)).kind == "unknown"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (error(-32000, "execution reverted", data="0x08c379a0"), error(3, "execution reverted", data="0x08c379a0")),
        (error(-32000, "header not found"), error(-32000, "header not found")),
        (error(-32000, "Method foo not found"), error(-32601, "Method foo not found")),
        (error(-32000, "execution timeout"), error(-32015, "execution timeout")),
        (
            error(-32005, "query returned more than 10000 results"),
            error(-32602, "query returned more than 10000 results"),
        ),
    ],
)
def test_error_is_given_our_code_with_its_own_message_and_data(raw: bytes, expected: bytes) -> None:
    assert json.loads(translate(raw)) == json.loads(expected)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"code": 3, "message": "execution reverted", "data": "0x"}',
        b'{"code": -32000, "message": "nonce too low"}',
        b'{"code": -32602, "message": "invalid argument 0"}',
    ],
)
def test_error_that_is_right_already_is_kept(raw: bytes) -> None:
    assert json.loads(translate(raw)) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"code":1,"message":"odd","url":"secret"}', {"code": 1, "message": "odd"}),
        (b'{"code":1,"message":"secret","message":"odd"}', {"code": 1, "message": "odd"}),
        (b'{"code":"1","message":"secret"}', {"code": 1, "message": "the upstream failed"}),
        (b'{"code":1e0,"message":"secret"}', {"code": 1, "message": "the upstream failed"}),
        (b'{"message":"secret"}', {"code": -32603, "message": "the upstream failed"}),
        (b'"secret"', {"code": -32603, "message": "the upstream failed"}),
    ],
)
def test_only_the_members_of_an_error_object_are_shown(raw: bytes, expected: dict[str, object]) -> None:
    assert json.loads(translate(raw)) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (error(3, "execution reverted: KEY12345", data="0x"), error(3, "execution reverted")),
        (error(3, "execution reverted", data={"a": ["key12345"]}), error(3, "execution reverted")),
        (
            b'{"code":-32602,"message":"\\u004bEY12345"}',
            error(-32602, "the upstream rejected the call as invalid"),
        ),
        (error(-32601, "see KEY12345"), error(-32601, "the upstream does not support the call")),
    ],
)
def test_private_words_are_not_shown(raw: bytes, expected: bytes) -> None:
    verdict = upstream_errors.classify(raw)
    shown = upstream_errors.translate(raw, verdict, in_our_codes=True, private=("key12345",))
    assert json.loads(shown) == json.loads(expected)


def test_words_under_no_id_are_not_shown() -> None:
    raw = error(-32600, "the gateway has no route to 7", data=7)
    shown = upstream_errors.translate(raw, upstream_errors.classify(raw), in_our_codes=True, is_named=False)
    assert json.loads(shown) == {"code": -32600, "message": "the upstream rejected the call as invalid"}


def test_data_keeps_its_bytes_under_a_new_code() -> None:
    raw = b'{"code":-32000,"message":"execution reverted","data":{"n":123456789012345678901234567890, "f":1.10}}'
    assert b'"data":{"n":123456789012345678901234567890, "f":1.10}' in translate(raw)


def test_words_about_the_upstreams_key_stay_here() -> None:
    for ours in (True, False):
        said = translate(error(-32000, "invalid api key: abcdef", data={"project": "abcdef"}), ours=ours)
        assert json.loads(said) == {"code": -32603, "message": "the upstream refused the call"}


@pytest.mark.parametrize(("ours", "code"), [(True, -32005), (False, 429)])
def test_words_about_the_upstreams_deal_with_us_stay_here(ours: bool, code: int) -> None:
    raw = error(429, "Too many requests: upgrade your tier at https://vendor.example/us", data={"account": "us"})
    assert json.loads(translate(raw, ours=ours)) == {
        "code": code, "message": "the upstream takes no more calls at the moment",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        'internal error: Post "http://user:secret@node/path": EOF',
        "server error: dial tcp 10.1.2.3:8545",
        "service unavailable: node-7.inner.example:8545",
        "connection refused by [fd00::12]:8545",
        "localhost is unavailable",
        'no idea: Post "https://node.example/v2/secret"',
        "timed out: wss://node.example/secret",
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_address_behind_an_upstream_is_not_shown(words: str, ours: bool) -> None:
    assert b"upstream" in translate(error(-32000, words), ours=ours)
    for secret in (b"secret", b"10.1", b"node", b"fd00", b"localhost", b"8545"):
        assert secret not in translate(error(-32000, words), ours=ours)
        assert secret not in translate(error(-32603, "Internal error", data={"cause": words}), ours=ours)


@pytest.mark.parametrize(
    "raw",
    [
        error(-32603, "Internal error", data={"trace": "0x"}),
        error(-32000, "the sequencer has gone fishing"),
        error(3, "execution reverted: see https://token.example", data="0x"),
        error(-32005, "Node is behind by 42 slots", data={"numSlotsBehind": 42}),
    ],
)
def test_other_words_are_passed_on_as_they_are(raw: bytes) -> None:
    assert json.loads(translate(raw, ours=False)) == json.loads(raw)


def test_phrases_are_lower_case_so_that_they_can_match() -> None:
    for rule in upstream_errors.RULES:
        assert rule.pattern is None or rule.pattern.pattern == rule.pattern.pattern.lower()
        assert rule.pattern is not None or rule.codes
