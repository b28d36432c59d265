"""Blocks in the params and results of EVM calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.chains.evm.methods import EARLIEST, EVM, LATEST, PENDING
from proxy.chains.family import HASH, NONE, BlockRef
from tests.shipped_tables import TABLES

METHODS = TABLES.methods["evm"]
ADDRESS = '"0x52908400098527886e0f7030069857d2e4169ee7"'
BLOCK_HASH = '"0x' + "ab" * 32 + '"'
NAMED = BlockRef("hash", block_hash="0x" + "ab" * 32)
HEAD, FINAL = 1000, 900


def number(value: int) -> BlockRef:
    return BlockRef("number", value)


def tag(name: str) -> BlockRef:
    return BlockRef("tag", tag=name)


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("eth_getBalance", f'[{ADDRESS},"latest"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS}, "latest" ]', LATEST),
        ("eth_getBalance", f"[{ADDRESS}]", LATEST),
        ("eth_getBalance", f"[{ADDRESS},null]", LATEST),
        ("eth_getBalance", f'[{ADDRESS},"pending"]', PENDING),
        ("eth_getBalance", f'[{ADDRESS},"PENDING"]', PENDING),
        ("eth_getBalance", f'[{ADDRESS},"safe"]', tag("safe")),
        ("eth_getBalance", f'[{ADDRESS},"finalized"]', tag("finalized")),
        ("eth_getBalance", f'[{ADDRESS},"earliest"]', EARLIEST),
        ("eth_getBalance", f'[{ADDRESS},"0x10"]', number(16)),
        ("eth_getBalance", f'[{ADDRESS},"0X10"]', number(16)),
        ("eth_getBalance", f'[{ADDRESS},"0x0010"]', number(16)),
        ("eth_getBalance", f'[{ADDRESS},"0x0"]', number(0)),
        ("eth_getBalance", f"[{ADDRESS},{BLOCK_HASH}]", NAMED),
        ("eth_getBalance", f'[{ADDRESS},{{"blockNumber":"0x10"}}]', number(16)),
        ("eth_getBalance", f'[{ADDRESS},{{"blockNumber":"latest"}}]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},{{"blockHash":{BLOCK_HASH},"requireCanonical":true}}]', NAMED),
        ("eth_getBalance", f"[{ADDRESS},{{}}]", LATEST),
        # Nonsense is for the upstream to refuse.
        ("eth_getBalance", f"[{ADDRESS},16]", LATEST),
        ("eth_getBalance", f'[{ADDRESS},"16"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},"0x"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},"0x1_0"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},"0x+1"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},"0xzz"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},["0x1"]]', LATEST),
        ("eth_getBalance", '{"address":"0x1","block":"0x1"}', LATEST),
        ("eth_getBalance", "", LATEST),
        ("eth_getBalance", "[" * 5000, LATEST),
        # Params that only look like the usual ending.
        ("eth_getBalance", f'[{ADDRESS},"0x10","latest"]', number(16)),
        ("eth_getBalance", '["a,\\"latest"]', LATEST),
        ("eth_getStorageAt", f'[{ADDRESS},"0x0","latest"]', LATEST),
        ("eth_getStorageAt", f'[{ADDRESS},"0x10"]', LATEST),
        ("eth_getStorageAt", '["a,b","latest"]', LATEST),
        # Escapes are read, not searched.
        ("eth_getBalance", f'[{ADDRESS},"l\\u0061test"]', LATEST),
        ("eth_getBalance", f'[{ADDRESS},"p\\u0065nding"]', PENDING),
        ("eth_getBalance", f'[{ADDRESS},"\\u0030x10"]', number(16)),
        ("eth_getBalance", f'[{ADDRESS},{{"block\\u004eumber":"0x10"}}]', number(16)),
        # Go matches names without case, so the oldest block named is the one that counts.
        ("eth_getBalance", f'[{ADDRESS},{{"blockNumber":"latest","BLOCKNUMBER":"0x1"}}]', number(1)),
        ("eth_getBalance", f'[{ADDRESS},{{"bloc\u212anumber":"0x1"}}]', number(1)),
        ("eth_getBlockByNumber", '["latest",false]', LATEST),
        ("eth_getBlockByNumber", '["0x1b4",true]', number(436)),
        ("eth_getBlockByNumber", "[]", LATEST),
        ("eth_call", f'[{{"to":{ADDRESS},"data":"0x,latest"}},"latest"]', LATEST),
        ("eth_call", f'[{{"to":{ADDRESS}}},"0x5",{{"0x1":{{"balance":"0x1"}}}}]', number(5)),
        ("eth_getLogs", '[{"fromBlock":"0x5","toBlock":"latest"}]', number(5)),
        ("eth_getLogs", '[{"toBlock":"0x7","address":[]}]', number(7)),
        ("eth_getLogs", '[{"fromBlock":null,"toBlock":"0x7"}]', number(7)),
        ("eth_getLogs", '[{"fromBlock":"earliest"}]', EARLIEST),
        ("eth_getLogs", f'[{{"blockHash":{BLOCK_HASH}}}]', NAMED),
        ("eth_getLogs", '[{"address":"0x1"}]', LATEST),
        ("eth_getLogs", "[]", LATEST),
        ("trace_filter", '[{"fromBlock":"0x5"}]', number(5)),
        ("eth_getBlockByHash", f"[{BLOCK_HASH},false]", HASH),
        ("eth_getTransactionReceipt", f"[{BLOCK_HASH}]", HASH),
        ("eth_chainId", "[]", NONE),
        ("eth_sendRawTransaction", '["0x02"]', NONE),
    ],
)
def test_block_of_a_call_is_read_from_its_raw_params(method: str, params: str, expected: BlockRef) -> None:
    assert EVM.block_ref(METHODS[method], params.encode()) == expected
    assert EVM.block_ref(METHODS[method], params.replace("[", "[" + " " * 5000, 1).encode()) == expected


@pytest.mark.parametrize("block", ['"%s"', '{"blockNumber":"%s"}', '"0x%s"'])
def test_text_too_long_for_a_block_counts_as_latest(block: str) -> None:
    params = f"[{ADDRESS},{block % ('1' * 1_000_000)}]".encode()
    assert EVM.block_ref(METHODS["eth_getBalance"], params) == tag("latest")


@pytest.mark.parametrize("name", ["0x5", "finalized", "0x" + "ab" * 32])
def test_every_character_of_a_block_may_be_escaped(name: str) -> None:
    escaped = "".join(f"\\u{ord(each):04x}" for each in name)
    params = [f'[{ADDRESS},"{text}"]'.encode() for text in (name, escaped)]
    assert len({EVM.block_ref(METHODS["eth_getBalance"], each) for each in params}) == 1


def _plainly(params: list[object], at: int) -> BlockRef:
    """The same rule for strings, by decoding everything."""
    word = params[at] if at < len(params) else "latest"
    if not isinstance(word, str) or word.lower() not in ("latest", "pending", "earliest", "safe", "finalized"):
        return LATEST
    return tag(word.lower())


words = st.sampled_from(["latest", "pending", "earliest", ',"latest"', "a,b", '"', "\\", "0xg", "Latest"]) | st.text()


@given(
    st.sampled_from([("eth_getBlockByNumber", 0), ("eth_getBalance", 1), ("eth_getProof", 2)]),
    st.lists(words | st.booleans() | st.lists(words, max_size=2), max_size=4),
    st.booleans(),
)
@example(("eth_getBalance", 1), ["a", "latest"], True)
@example(("eth_getBalance", 1), ["a", "pending", "latest"], False)
@example(("eth_getBlockByNumber", 0), ["g" * 66], True)
def test_shortcuts_agree_with_a_full_decode(method: tuple[str, int], params: list[object], compact: bool) -> None:
    name, at = method
    text = json.dumps(params, separators=(",", ":") if compact else None)
    assert EVM.block_ref(METHODS[name], text.encode()) == _plainly(params, at)


@given(st.sampled_from(sorted(METHODS)), st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_make_the_family_raise(name: str, params: bytes, result: bytes) -> None:
    method = METHODS[name]
    ref = EVM.block_ref(method, params)
    assert EVM.lifetime(method, params, result, ref, HEAD, FINAL) in ("never", "head", "forever")
    assert EVM.is_empty(method, result) in (True, False)


def mined(at: int, member: str = "blockNumber") -> str:
    return f'{{"hash":"0x1","{member}":"0x{at:x}"}}'


@pytest.mark.parametrize(
    ("method", "params", "result", "expected"),
    [
        ("eth_chainId", "[]", '"0x1"', "forever"),
        ("net_version", "[]", '"1"', "forever"),
        ("web3_sha3", '["0x00"]', '"0xab"', "forever"),
        ("web3_clientVersion", "[]", '"geth"', "never"),
        ("eth_syncing", "[]", "false", "never"),
        ("eth_blockNumber", "[]", '"0x10"', "head"),
        ("eth_gasPrice", "[]", '"0x10"', "head"),
        ("eth_feeHistory", '["0x5","latest",[]]', "{}", "head"),
        ("eth_feeHistory", '["0x5","0x5",[]]', "{}", "forever"),
        # A block parameter: final numbers for ever, other blocks until the head moves.
        ("eth_getBalance", f'[{ADDRESS},"0x{FINAL:x}"]', '"0x1"', "forever"),
        ("eth_getBalance", f'[{ADDRESS},"0x{FINAL + 1:x}"]', '"0x1"', "head"),
        ("eth_getBalance", f'[{ADDRESS},"0x{HEAD + 1:x}"]', '"0x1"', "never"),
        ("eth_getBalance", f'[{ADDRESS},"latest"]', '"0x1"', "head"),
        ("eth_getBalance", f'[{ADDRESS},"safe"]', '"0x1"', "head"),
        ("eth_getBalance", f'[{ADDRESS},"finalized"]', '"0x1"', "head"),
        ("eth_getBalance", f'[{ADDRESS},"earliest"]', '"0x1"', "forever"),
        ("eth_getBalance", f'[{ADDRESS},"pending"]', '"0x1"', "never"),
        ("eth_getBalance", f"[{ADDRESS},{BLOCK_HASH}]", '"0x1"', "head"),
        ("eth_call", '[{},"pending"]', '"0x1"', "never"),
        ("eth_estimateGas", '[{},"pending"]', '"0x1"', "never"),
        ("eth_call", '[{},"0x5"]', '"0x01"', "forever"),
        ("eth_call", '[{},"0x5"]', '"0x"', "never"),
        ("eth_getBlockByNumber", '["0x5",false]', mined(5, "number"), "forever"),
        ("eth_getBlockByNumber", '["0x5",false]', "null", "never"),
        ("eth_getBlockByNumber", '["latest",false]', mined(HEAD, "number"), "head"),
        ("eth_getBlockReceipts", f"[{BLOCK_HASH}]", f"[{mined(5)},{mined(5)}]", "forever"),
        ("eth_getBlockReceipts", f"[{BLOCK_HASH}]", f"[{mined(FINAL + 1)}]", "head"),
        ("debug_traceBlockByNumber", '["0x5"]', "[{}]", "forever"),
        # A nonce must show the caller's own writes.
        ("eth_getTransactionCount", f'[{ADDRESS},"latest"]', '"0x1"', "never"),
        ("eth_getTransactionCount", f'[{ADDRESS},"0x{FINAL + 1:x}"]', '"0x1"', "never"),
        ("eth_getTransactionCount", f'[{ADDRESS},"0x{FINAL:x}"]', '"0x1"', "forever"),
        # By hash: the block in the answer decides.
        ("eth_getBlockByHash", f"[{BLOCK_HASH},false]", mined(FINAL, "number"), "forever"),
        ("eth_getBlockByHash", f"[{BLOCK_HASH},false]", mined(FINAL + 1, "number"), "head"),
        ("eth_getBlockByHash", f"[{BLOCK_HASH},false]", "null", "never"),
        ("eth_getBlockByHash", f"[{BLOCK_HASH},true]",
         f'{{"transactions":[{mined(1)}],"number":"0x{HEAD:x}"}}', "head"),
        ("eth_getTransactionByHash", f"[{BLOCK_HASH}]", mined(5), "forever"),
        ("eth_getTransactionByHash", f"[{BLOCK_HASH}]", mined(HEAD), "head"),
        ("eth_getTransactionByHash", f"[{BLOCK_HASH}]", '{"hash":"0x1","blockNumber":null}', "never"),
        ("eth_getTransactionByHash", f"[{BLOCK_HASH}]", "null", "never"),
        ("eth_getTransactionReceipt", f"[{BLOCK_HASH}]", mined(5), "forever"),
        ("eth_getTransactionReceipt", f"[{BLOCK_HASH}]", mined(HEAD), "head"),
        ("eth_getTransactionReceipt", f"[{BLOCK_HASH}]", "null", "never"),
        ("trace_transaction", f"[{BLOCK_HASH}]", '[{"blockNumber":5},{"blockNumber":5}]', "forever"),
        ("trace_transaction", f"[{BLOCK_HASH}]", "[]", "never"),
        ("debug_traceTransaction", f"[{BLOCK_HASH}]", '{"gas":1}', "head"),
        ("eth_getBlockTransactionCountByHash", f"[{BLOCK_HASH}]", '"0x5"', "head"),
        # Logs: the whole range decides.
        ("eth_getLogs", f'[{{"fromBlock":"0x1","toBlock":"0x{FINAL:x}"}}]', "[1]", "forever"),
        ("eth_getLogs", '[{"fromBlock":"earliest","toBlock":"0x1"}]', "[1]", "forever"),
        ("eth_getLogs", f'[{{"fromBlock":"0x1","toBlock":"0x{FINAL + 1:x}"}}]', "[1]", "head"),
        ("eth_getLogs", f'[{{"fromBlock":"0x1","toBlock":"0x{HEAD + 1:x}"}}]', "[1]", "never"),
        ("eth_getLogs", '[{"fromBlock":"0x1","toBlock":"latest"}]', "[1]", "head"),
        ("eth_getLogs", '[{"fromBlock":"0x1","toBlock":"finalized"}]', "[1]", "head"),
        ("eth_getLogs", '[{"fromBlock":"0x1"}]', "[1]", "head"),
        ("eth_getLogs", "[{}]", "[1]", "head"),
        ("eth_getLogs", '[{"fromBlock":"0x1","toBlock":"pending"}]', "[1]", "never"),
        ("eth_getLogs", '[{"fromBlock":"0x1","toBlock":"0x2"}]', "[]", "never"),
        ("eth_getLogs", '[{"fromBlock":"0x1","toBlock":"0x2","TOBLOCK":"latest"}]', "[1]", "never"),
        ("eth_getLogs", f'[{{"blockHash":{BLOCK_HASH}}}]', f"[{mined(5)}]", "forever"),
        ("eth_getLogs", f'[{{"blockHash":{BLOCK_HASH}}}]', f"[{mined(HEAD)}]", "head"),
        ("eth_newFilter", "[{}]", '"0x1"', "never"),
        ("eth_getFilterChanges", '["0x1"]', "[1]", "never"),
        ("eth_sendRawTransaction", '["0x02"]', '"0xab"', "never"),
        ("eth_subscribe", '["newHeads"]', '"0x1"', "never"),
    ],
)  # fmt: skip
def test_result_is_kept_as_long_as_its_block_cannot_change(
    method: str, params: str, result: str, expected: str
) -> None:
    raw = params.encode()
    ref = EVM.block_ref(METHODS[method], raw)
    assert EVM.lifetime(METHODS[method], raw, result.encode(), ref, HEAD, FINAL) == expected


@given(st.sampled_from(sorted(METHODS)), st.sampled_from(["[]", f'[{ADDRESS},"0x1","0x1"]', '["0x1"]']))
def test_null_is_never_kept(name: str, params: str) -> None:
    ref = EVM.block_ref(METHODS[name], params.encode())
    assert EVM.lifetime(METHODS[name], params.encode(), b"null", ref, HEAD, FINAL) == "never"


@given(st.sampled_from(sorted(METHODS)), st.integers(FINAL + 1, 2 * HEAD))
def test_nothing_above_the_final_height_is_kept_for_ever(name: str, at: int) -> None:
    method = METHODS[name]
    params = json.dumps(["0x1"] * (method.block_at or 0) + [f"0x{at:x}"]).encode()
    if method.cache != "static":
        ref = EVM.block_ref(method, params)
        assert EVM.lifetime(method, params, mined(at).encode(), ref, HEAD, FINAL) != "forever"


@pytest.mark.parametrize(
    ("ref", "head", "expected"),
    [
        (number(HEAD - 127), HEAD, False),
        (number(HEAD - 128), HEAD, True),
        (number(0), 100, False),
        (number(HEAD + 5), HEAD, False),
        (EARLIEST, HEAD, True),
        (LATEST, HEAD, False),
        (tag("finalized"), HEAD, False),
        (HASH, HEAD, False),
        (NONE, HEAD, False),
    ],
)
def test_state_older_than_128_blocks_is_an_archive_read(ref: BlockRef, head: int, expected: bool) -> None:
    assert TABLES.chains.families["evm"].is_archive(ref, head) is expected


def test_only_moving_tags_move() -> None:
    assert LATEST.moves
    assert tag("finalized").moves
    assert not EARLIEST.moves
    assert not number(1).moves
    assert not HASH.moves


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("eth_getBlockByNumber", b"null", True),
        ("eth_getTransactionReceipt", b"null", True),
        ("eth_getLogs", b"[]", True),
        ("eth_getLogs", b"[ ]", True),
        ("eth_getLogs", b"[{}]", False),
        ("eth_getCode", b'"0x"', True),
        ("eth_call", b'"0x"', True),
        ("eth_getBalance", b'"0x0"', False),
        ("eth_feeHistory", b"{}", False),
        ("eth_feeHistory", b"null", True),
    ],
)
def test_empty_results_are_recognised(method: str, result: bytes, expected: bool) -> None:
    assert EVM.is_empty(METHODS[method], result) is expected


def test_only_a_signed_transaction_is_identified_by_its_params() -> None:
    assert [method.name for method in METHODS.values() if method.identified] == ["eth_sendRawTransaction"]


def test_only_reads_are_kept() -> None:
    assert {method.kind for method in METHODS.values() if method.cache != "never"} == {"read"}
