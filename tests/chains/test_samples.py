"""A sample of every event type, in the shape of true ones."""

from __future__ import annotations

import pytest

from proxy.chains.evm import samples
from proxy.chains.evm.watch_index import KINDS

# The specification's fields (section 6), where it gives them.
GIVEN = {
    "address_activity": {
        *("chain", "block_number", "tx_hash", "from", "to", "value", "asset", "contract", "direction", "status"),
    },
    "token_transfer": {"chain", "block_number", "tx_hash", "contract", "from", "to", "value", "symbol", "decimals"},
    "nft_transfer": {
        *("chain", "block_number", "tx_hash", "contract", "from", "to", "token_id", "standard", "quantity"),
    },
    "TOKEN_TRANSFER": {
        *("blockNumber", "transactionHash", "logIndex", "from", "to", "token", "value", "valueFormatted"),
    },
}


@pytest.mark.parametrize("event_type", KINDS)
def test_every_type_has_a_sample(event_type: str) -> None:
    found = samples.sample_of(event_type, chain="dev", symbol="ETH", decimals=18, block=12, time="2026-01-15T09:30:00Z")
    assert found
    if event_type in GIVEN:
        assert set(found) == GIVEN[event_type]
    # Nothing is left open but what a true event may leave open, too.
    assert {name for name, value in found.items() if value is None} <= {
        "contract",
        "token",
        "tokenId",
        "logIndex",
        "selector",
    }


def test_each_sample_is_a_fresh_copy() -> None:
    given = {"chain": "dev", "symbol": "ETH", "decimals": 18, "block": 12, "time": ""}
    samples.sample_of("log", **given)["topics"].append("0x")  # type: ignore[arg-type]
    assert len(samples.sample_of("log", **given)["topics"]) == 3  # type: ignore[arg-type]
