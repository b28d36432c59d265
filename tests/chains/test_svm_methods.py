"""Slots in the params and results of Solana's calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.family import NONE, BlockRef
from proxy.chains.svm.methods import SVM
from tests.shipped_tables import TABLES

METHODS = TABLES.methods["svm"]
HEAD, FINAL = 1000, 900


def tag(name: str) -> BlockRef:
    return BlockRef("tag", tag=name)


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("getBalance", '["addr"]', tag("finalized")),
        ("getBalance", '["addr",{"commitment":"confirmed"}]', tag("confirmed")),
        ("getBalance", '["addr",{"c\\u006fmmitment":"processed"}]', tag("processed")),
        ("getBalance", '["addr",{"commitment":"made up"}]', tag("processed")),
        ("getBalance", '["addr",{"COMMITMENT":"processed"}]', tag("finalized")),
        ("getBalance", '["commitment"]', tag("finalized")),
        ("getSlot", "", tag("finalized")),
        ("getSlot", '[{"commitment":"processed"}]', tag("processed")),
        ("getBlock", "[5]", BlockRef("number", 5, "finalized")),
        ("getBlock", '[5,{"commitment":"confirmed","encoding":"json"}]', BlockRef("number", 5, "confirmed")),
        ("getBlock", '["5"]', tag("finalized")),
        ("getBlock", "[-5]", tag("finalized")),
        ("getBlock", "[1e999]", tag("finalized")),
        ("getBlock", "{}", tag("finalized")),
        ("getBlockTime", "[5]", BlockRef("number", 5, "finalized")),
        ("getTransaction", '["sig"]', BlockRef("hash", tag="finalized")),
        ("getTransaction", '["sig",{"commitment":"confirmed"}]', BlockRef("hash", tag="confirmed")),
        ("getGenesisHash", "[]", NONE),
        ("sendTransaction", '["tx",{"preflightCommitment":"processed"}]', NONE),
    ],
)
def test_slot_and_commitment_are_read_from_the_raw_params(method: str, params: str, expected: BlockRef) -> None:
    assert SVM.block_ref(METHODS[method], params.encode()) == expected


@pytest.mark.parametrize(
    ("method", "params", "result", "expected"),
    [
        ("getBlock", f"[{FINAL}]", '{"blockhash":"x"}', "forever"),
        ("getBlock", f"[{FINAL + 1}]", '{"blockhash":"x"}', "head"),
        ("getBlock", f"[{HEAD + 1}]", '{"blockhash":"x"}', "never"),
        ("getBlock", '[5,{"commitment":"confirmed"}]', '{"blockhash":"x"}', "head"),
        ("getBlock", "[5]", "null", "never"),
        ("getBlock", '["5"]', '{"blockhash":"x"}', "head"),
        ("getTransaction", '["sig"]', '{"slot":5,"meta":{}}', "forever"),
        ("getTransaction", '["sig"]', f'{{"slot":{FINAL + 1}}}', "head"),
        ("getTransaction", '["sig",{"commitment":"confirmed"}]', '{"slot":5}', "head"),
        ("getTransaction", '["sig"]', "null", "never"),
        ("getTransaction", '["sig"]', '{"meta":{}}', "head"),
        # The finalized commitment is a moving head, not final data.
        ("getBalance", '["addr",{"commitment":"finalized"}]', '{"context":{"slot":5},"value":7}', "head"),
        ("getBalance", '["addr",{"commitment":"processed"}]', '{"context":{"slot":5},"value":7}', "never"),
        ("getAccountInfo", '["addr"]', '{"context":{"slot":5},"value":null}', "never"),
        ("getAccountInfo", '["addr"]', '{"value": null, "context":{"slot":5}}', "never"),
        ("getFeeForMessage", '["m"]', '{"context":{"slot":5},"value":null}', "never"),
        ("getBlockTime", "[5]", "17", "head"),
        ("getLatestBlockhash", "[]", '{"context":{"slot":5},"value":{"blockhash":"x"}}', "head"),
        ("getSignatureStatuses", '[["sig"]]', '{"context":{"slot":5},"value":[{"slot":5}]}', "never"),
        ("getGenesisHash", "[]", '"x"', "forever"),
        ("getHealth", "[]", '"ok"', "never"),
        ("sendTransaction", '["tx"]', '"sig"', "never"),
    ],
)
def test_only_slot_pinned_finalized_results_are_kept_for_ever(
    method: str, params: str, result: str, expected: str
) -> None:
    raw = params.encode()
    ref = SVM.block_ref(METHODS[method], raw)
    assert SVM.lifetime(METHODS[method], raw, result.encode(), ref, HEAD, FINAL) == expected


@given(st.sampled_from(sorted(METHODS)), st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_make_the_family_raise(name: str, params: bytes, result: bytes) -> None:
    method = METHODS[name]
    ref = SVM.block_ref(method, params)
    assert SVM.lifetime(method, params, result, ref, HEAD, FINAL) in ("never", "head", "forever")


def test_slot_beyond_the_ledger_is_an_archive_read() -> None:
    family = TABLES.chains.families["svm"]
    kept = family.kept_blocks
    assert family.is_archive(BlockRef("number", 0, "finalized"), kept)
    assert not family.is_archive(BlockRef("number", 1, "finalized"), kept)
    assert not family.is_archive(tag("finalized"), kept)


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("getBlock", b"null", True),
        ("getBlocks", b"[]", True),
        ("getSlot", b"5", False),
        ("getProgramAccounts", b"[]", True),
        ("getProgramAccounts", b"[ ]", True),
        ("getTokenAccountsByOwner", b'{"context":{"slot":1},"value":[]}', True),
        ("getAccountInfo", b'{"context":{"slot":1},"value":{}}', True),
        ("getAccountInfo", b'{"context":{"slot":1},"value":{"lamports":1}}', False),
        ("simulateTransaction", b'{"context":{"slot":1},"value":[]}', False),
    ],
)
def test_empty_results_are_recognised_inside_their_context_too(method: str, result: bytes, expected: bool) -> None:
    assert SVM.is_empty(METHODS[method], result) is expected


def test_writes_may_never_be_sent_again() -> None:
    assert not any(method.identified for method in METHODS.values())
    assert {name for name, method in METHODS.items() if method.kind == "write"} == {"sendTransaction", "requestAirdrop"}
