"""One account cannot fill the database with events of its webhooks: its plan limits how many are stored per day."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import REGISTRY

from proxy.errors import RateLimited
from proxy.services.delivery.history import DeliveryHistory
from proxy.store.postgres.deliveries import DeliveryStore
from tests.chain_upstream import erc721
from tests.database import connected
from tests.follower.conftest import harness
from tests.follower.event_harness import ART, A, B, EventHarness
from tests.follower.harness import NETWORK
from tests.shipped_tables import TABLES

__all__ = ("harness",)

LIMIT = TABLES.plans["free"].webhook_events_per_day


async def make_free(harness: EventHarness, account: str, *, stored: int) -> None:
    """An account on the Free plan that has stored so many events today on another network."""
    async with connected(harness.inner.database) as connection:
        await connection.execute("update accounts set plan = 'free' where id = $1", account)
        await connection.execute(
            "insert into event_days (account_id, day, network, stored)"
            " values ($1, (now() at time zone 'utc')::date, 'ethereum/mainnet', $2)",
            account,
            stored,
        )


async def stored_by(harness: EventHarness, account: str) -> int:
    (row,) = await harness.rows(
        f"select count(*) from events join webhooks w on w.id = webhook_id where account_id = '{account}'"
    )
    return int(row["count"])


async def counted(harness: EventHarness, account: str) -> tuple[int, int]:
    """The events that were stored and dropped on the harness's network."""
    rows = await harness.rows(
        f"select stored, dropped from event_days where account_id = '{account}' and network = '{NETWORK}'"
    )
    return (rows[0]["stored"], rows[0]["dropped"]) if rows else (0, 0)


def dropped_total() -> float:
    return REGISTRY.get_sample_value("penstock_events_dropped_total", {"network": NETWORK}) or 0.0


async def test_events_above_the_daily_limit_are_dropped_and_counted(
    harness: EventHarness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.step()
    hook = await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], account="acct_free")
    await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], account="acct_growth")
    await make_free(harness, "acct_free", stored=LIMIT - 3)
    before = dropped_total()
    with caplog.at_level(logging.WARNING, "penstock.events"):
        await harness.mine([erc721(ART, A, B, n) for n in range(2)])
        assert await counted(harness, "acct_free") == (2, 0)
        await harness.mine([erc721(ART, A, B, n) for n in range(2, 6)], [erc721(ART, A, B, 6)])
        await harness.mine([erc721(ART, A, B, 7)])
    assert (await stored_by(harness, "acct_free"), await stored_by(harness, "acct_growth")) == (3, 8)
    assert await counted(harness, "acct_free") == (3, 5)
    assert await counted(harness, "acct_growth") == (8, 0)
    assert dropped_total() - before == 5
    warnings = [record for record in caplog.records if "daily limit of webhook events" in record.getMessage()]
    assert [record.__dict__["account"] for record in warnings] == ["acct_free"]
    # Another webhook gives no more room, nor does one that is paused or deleted.
    await harness.store.move(hook, "pause")
    await harness.store.move(hook, "delete")
    for config in ({}, {"finality": "finalized"}):
        await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], account="acct_free", **config)
    await harness.mine([erc721(ART, A, B, 8)])
    assert await stored_by(harness, "acct_free") == 3
    # The next day.
    async with connected(harness.inner.database) as connection:
        await connection.execute("update event_days set day = day - 1")
    await harness.mine([erc721(ART, A, B, 9)])
    assert await stored_by(harness, "acct_free") == 5


async def test_test_event_above_the_daily_limit_is_refused(harness: EventHarness) -> None:
    hook = await harness.webhook("nft_transfer", contracts=["0x" + ART.hex()], account="acct_free")
    await make_free(harness, "acct_free", stored=LIMIT - 1)
    limits = {"free": LIMIT}
    history = DeliveryHistory(DeliveryStore(harness.inner.running.pool), limits)
    await history.test(hook, harness.inner.route.network, event_type=None)
    with pytest.raises(RateLimited, match="00:00 UTC"):
        await history.test(hook, harness.inner.route.network, event_type=None)
    assert await stored_by(harness, "acct_free") == 1
    limits["free"] = 0
    await history.test(hook, harness.inner.route.network, event_type=None)
    assert await stored_by(harness, "acct_free") == 2
