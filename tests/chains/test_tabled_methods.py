"""How long results of families that are data alone are valid."""

from __future__ import annotations

import pytest

from tests.shipped_tables import TABLES

HEAD, FINAL = 500, 494
TXID = b'["' + b"ab" * 32 + b'",1]'


def lifetime(family: str, method: str, params: bytes, result: bytes) -> str:
    rules, row = TABLES.chains.families[family], TABLES.methods[family][method]
    return rules.lifetime(row, params, result, rules.block_ref(row, params), HEAD, FINAL)


@pytest.mark.parametrize(
    ("family", "method", "params", "in_no_block", "in_a_block"),
    [
        ("bitcoin", "getrawtransaction", TXID, b'{"hex":"00"}', b'{"hex":"00","confirmations":1}'),
        # A block that was replaced.
        ("bitcoin", "getrawtransaction", TXID, b'{"blockhash":"00","confirmations":0}', b'{"confirmations":7}'),
        (
            "starknet",
            "starknet_getTransactionStatus",
            b'["0x1"]',
            b'{"finality_status":"RECEIVED"}',
            b'{"finality_status":"ACCEPTED_ON_L2"}',
        ),
        (
            "starknet",
            "starknet_getTransactionReceipt",
            b'["0x1"]',
            b'{"finality_status":"PRE_CONFIRMED"}',
            b'{"finality_status":"ACCEPTED_ON_L2"}',
        ),
        (
            "near",
            "tx",
            b'{"tx_hash":"a","sender_account_id":"b"}',
            b'{"final_execution_status":"INCLUDED"}',
            b'{"final_execution_status":"EXECUTED_OPTIMISTIC"}',
        ),
        (
            "aptos",
            "GET /v1/transactions/by_hash/{hash}",
            b'{"path":{"hash":"0x1"}}',
            b'{"status":200,"body":{"type":"pending_transaction"}}',
            b'{"status":200,"body":{"type":"user_transaction"}}',
        ),
    ],
)
def test_transaction_in_no_block_is_not_cached(
    family: str, method: str, params: bytes, in_no_block: bytes, in_a_block: bytes
) -> None:
    assert lifetime(family, method, params, in_no_block) == "never"
    assert lifetime(family, method, params, in_a_block) == "head"


@pytest.mark.parametrize("height", ['"0"', '"00"', '"+0"', '"-0"', '"%s"' % ("0" * 30), '"\\u0030"', "0", "null", '""'])
def test_newest_block_of_cosmos_is_never_final(height: str) -> None:
    """Nodes read all of these as height 0 or as none, which is the newest block."""
    params = b'{"path":"/store","height":%b}' % height.encode()
    assert lifetime("cosmos", "abci_query", params, b'{"response":{}}') == "head"
    params = b'{"headers":{"x-cosmos-block-height":%b}}' % height.encode()
    assert lifetime("lcd", "GET /cosmos/bank/v1beta1/params", params, b'{"status":200,"body":{}}') == "head"


def test_height_in_a_header_is_final_once_it_is_reached() -> None:
    row, result = "GET /cosmos/bank/v1beta1/params", b'{"status":200,"body":{}}'
    expected = {FINAL: "forever", FINAL + 1: "head", HEAD + 1: "never"}
    for height, found in expected.items():
        params = b'{"headers":{"x-cosmos-block-height":"%d"}}' % height
        assert lifetime("lcd", row, params, result) == found
    assert lifetime("lcd", row, b"{}", result) == "head"
