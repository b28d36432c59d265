"""The method tables: what is not in them does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shipped_tables import TABLES

METHODS = TABLES.methods
FAMILIES = TABLES.chains.families


def kinds(family: str, kind: str) -> set[str]:
    return {method.name for method in METHODS[family].values() if method.kind == kind}


def test_every_chain_has_a_family_that_exists() -> None:
    assert {chain.family for chain in TABLES.chains.chains.values()} == set(FAMILIES)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_readme_and_guide_name_every_family(page: str) -> None:
    paragraphs = (Path(__file__).parents[2] / page).read_text("utf-8").split("\n\n")
    list_of_families = next(text for text in paragraphs if "hundreds of EVM networks" in text)
    names = {family.title.split()[0] for name, family in FAMILIES.items() if name != "evm"}
    assert {name for name in names if name.lower() not in list_of_families.lower()} == set()


def test_writes_are_exactly_those_that_need_the_write_scope() -> None:
    assert kinds("evm", "write") == {
        *("eth_sendRawTransaction", "eth_sendRawTransactionConditional", "eth_sendRawTransactionSync"),
        *("eth_sendPrivateTransaction", "eth_sendPrivateRawTransaction", "eth_cancelPrivateTransaction"),
        *("bor_sendRawTransactionConditional", "zks_sendRawTransactionWithDetailedOutput", "sei_associate"),
        "timeboost_sendExpressLaneTransaction",
    }
    assert kinds("svm", "write") == {"sendTransaction", "requestAirdrop"}


def test_subscriptions_need_a_socket() -> None:
    assert kinds("evm", "subscription") == {"eth_subscribe", "eth_unsubscribe"}
    assert all(name.endswith(("Subscribe", "Unsubscribe")) for name in kinds("svm", "subscription"))


@pytest.mark.parametrize(
    "method",
    [
        *("eth_sign", "eth_signTransaction", "eth_signTypedData_v4", "eth_sendTransaction", "eth_submitWork"),
        *("personal_unlockAccount", "admin_addPeer", "miner_start", "engine_newPayloadV3", "hardhat_setBalance"),
        *("evm_mine", "anvil_setCode", "txpool_clear", "debug_setHead", "debug_freeOSMemory"),
        *("ETH_CALL", "eth_call ", ""),
    ],
)
def test_dangerous_or_unknown_method_does_not_exist(method: str) -> None:
    assert not any(method in table for table in METHODS.values())


@pytest.mark.parametrize(
    ("method", "index"),
    [
        *(("eth_getBlockByNumber", 0), ("trace_block", 0), ("eth_getBalance", 1), ("eth_call", 1)),
        *(("eth_getStorageAt", 2), ("eth_getProof", 2), ("eth_blockNumber", None), ("eth_getBlockByHash", None)),
    ],
)
def test_block_parameter_stands_where_the_execution_api_has_it(method: str, index: int | None) -> None:
    assert METHODS["evm"][method].block_at == index


def test_tables_are_keyed_by_their_own_names() -> None:
    assert all(family.name == name for name, family in FAMILIES.items())
    assert all(key == method.name for table in METHODS.values() for key, method in table.items())
