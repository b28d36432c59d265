"""The configs of webhooks: what each event type takes, and how a refusal names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.chains.evm import webhook_filters
from proxy.chains.evm.log_filter import LogFilter
from proxy.chains.evm.watch_index import KINDS, WatchFilter
from proxy.chains.evm.webhook_filters import BadConfig

ADDRESS = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
RAW = bytes.fromhex(ADDRESS[2:])
HASH = "0x" + "Ab" * 32
TOPIC = "0x" + "cd" * 32


def test_whole_config_of_each_kind_is_read() -> None:
    found = webhook_filters.parse(
        "address_activity",
        {
            "addresses": [ADDRESS],
            "direction": "incoming",
            "categories": ["native", "erc20"],
            "min_value": "100000000000000000000000",
            "selectors": ["transfer(address,uint256)", "0xDEADBEEF"],
            "finality": "safe",
            "exclude_spam": True,
        },
    )
    assert (found.direction, found.min_value, found.finality) == ("incoming", 10**23, "safe")
    assert found.categories == {"native", "erc20"}
    assert found.selectors == {bytes.fromhex("a9059cbb"), bytes.fromhex("deadbeef")}
    assert found.exclude_spam
    found = webhook_filters.parse(
        "TOKEN_TRANSFER", {"contracts": [ADDRESS.lower()], "from": [ADDRESS], "to": [ADDRESS]}
    )
    assert found.contracts == found.senders == found.recipients == frozenset({RAW})
    found = webhook_filters.parse("NFT_ACTIVITY", {"contracts": [ADDRESS], "token_ids": ["0", str(2**256 - 1)]})
    assert found.token_ids == {0, 2**256 - 1}
    assert webhook_filters.parse("mined_transaction", {"tx_hashes": [HASH], "confirmations": 12}).tx_hashes == {
        HASH.lower()
    }
    found = webhook_filters.parse("log", {"topics": [TOPIC, None, [TOPIC, HASH]], "selector": "0xa9059cbb"})
    assert LogFilter(topics=found.topics).params()["topics"] == [[TOPIC], None, sorted([TOPIC, HASH.lower()])]
    assert webhook_filters.parse("NEW_BLOCK", {}).confirmations == 0


def test_value_alone_is_enough_in_format_b_only() -> None:
    assert webhook_filters.parse("TOKEN_TRANSFER", {"min_value": "5"}).min_value == 5
    with pytest.raises(BadConfig, match="addresses or contracts or from or to"):
        webhook_filters.parse("token_transfer", {"min_value": "5"})


@pytest.mark.parametrize(
    ("event_type", "config", "names"),
    [
        ("address_activity", {"direction": "incoming"}, "addresses"),
        ("address_activity", {"addresses": [ADDRESS], "contracts": [ADDRESS]}, "contracts: is unknown"),
        ("address_activity", {"addresses": ADDRESS}, "addresses: must be an array"),
        ("address_activity", {"addresses": [ADDRESS], "categories": ["coins"]}, "categories.0"),
        ("address_activity", {"addresses": [ADDRESS], "categories": [[]]}, "categories.0"),
        ("address_activity", {"addresses": [ADDRESS], "exclude_spam": "yes"}, "exclude_spam"),
        ("nft_transfer", {"token_ids": ["1"]}, "addresses or contracts"),
        ("nft_transfer", {"addresses": [ADDRESS], "token_ids": ["1"]}, "token_ids: the contracts"),
        ("nft_transfer", {"contracts": [ADDRESS], "token_ids": [1]}, "token_ids.0"),
        ("nft_transfer", {"contracts": [ADDRESS], "token_ids": [str(2**256)]}, "token_ids.0"),
        ("mined_transaction", {"tx_hashes": ["0x12"]}, "tx_hashes.0"),
        ("mined_transaction", {"tx_hashes": [HASH] * 1001}, "tx_hashes: has 1001"),
        ("log", {"selector": "f()"}, "addresses or topics"),
        ("log", {"topics": [None]}, "topics: must name"),
        ("log", {"topics": ["0x12"]}, "topics"),
        ("log", {"topics": [TOPIC] * 5}, "topics"),
        ("log", {"addresses": [ADDRESS] * 1001}, "addresses: has 1001"),
        ("log", {"addresses": [ADDRESS], "selector": "f"}, "selector"),
        ("INTERNAL_TRANSFER", {"addresses": [ADDRESS], "selectors": []}, "selectors: is unknown"),
        ("NEW_BLOCK", {"addresses": [ADDRESS]}, "addresses: is unknown"),
        ("PENDING_TRANSACTION", {"addresses": [ADDRESS], "finality": "safe"}, "finality: is unknown"),
        ("token_transfer", {"contracts": [ADDRESS], "min_value": "-1"}, "min_value"),
        ("token_transfer", {"contracts": [ADDRESS], "confirmations": 1001}, "confirmations"),
    ],
)
def test_refusal_names_the_member(event_type: str, config: dict[str, Any], names: str) -> None:
    with pytest.raises(BadConfig, match=names.replace("(", r"\(")):
        webhook_filters.parse(event_type, config)


@pytest.mark.parametrize("event_type", KINDS)
def test_config_may_be_empty(event_type: str) -> None:
    assert webhook_filters.parse(event_type, {}) == WatchFilter()


@pytest.mark.parametrize("event_type", ["ADDRESS_ACTIVITY", "TOKEN_TRANSFER", "NFT_ACTIVITY"])
def test_format_b_has_topics_and_selectors(event_type: str) -> None:
    found = webhook_filters.parse(
        event_type, {"addresses": [ADDRESS], "topics": [TOPIC], "selectors": ["transfer(address,uint256)"]}
    )
    assert found.topics == (bytes.fromhex(TOPIC[2:]),)
    assert found.selectors == {bytes.fromhex("a9059cbb")}


@pytest.mark.parametrize("event_type", ["TOKEN_TRANSFER", "NFT_ACTIVITY"])
@pytest.mark.parametrize("config", [{"topics": [TOPIC]}, {"selectors": ["transfer(address,uint256)"]}])
def test_topics_and_selectors_of_format_b_need_no_address(event_type: str, config: dict[str, Any]) -> None:
    assert webhook_filters.parse(event_type, config) != WatchFilter()


def test_addresses_are_read_in_parts_and_named_by_their_place_in_the_whole() -> None:
    assert webhook_filters.addresses_of([ADDRESS, ADDRESS.lower()]) == [RAW, RAW]
    for bad in ("0x12", 5, ADDRESS.replace("a", "A", 1), None):
        with pytest.raises(BadConfig, match=r"add_addresses\.2001"):
            webhook_filters.addresses_of([ADDRESS, bad], 2000, "add_addresses")


def test_every_event_type_of_the_contract_is_known() -> None:
    assert len(KINDS) == 12
    assert {name for name in KINDS if webhook_filters.takes_addresses(name)} == set(KINDS) - {
        "mined_transaction", "MINED_TRANSACTION", "NEW_BLOCK",
    }  # fmt: skip
