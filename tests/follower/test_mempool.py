"""Pending transactions: none that the upstream has reported is lost while it is overloaded, and owners see who is listening."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.errors import Fault
from proxy.services.rpc.calls import RpcError
from proxy.services.webhooks import webhooks as service_room
from proxy.services.webhooks.webhooks import Webhook, WebhookService
from proxy.store.postgres import events as store
from tests.follower.event_harness import A, B, EventHarness, transaction
from tests.rpc_upstreams import Refused

HASHES = ["0x" + f"{n:064x}" for n in range(4)]


def mempool(harness: EventHarness) -> list[str]:
    """Let the upstream have a mempool. Returns the hashes that its filter reports next."""
    upstream, new = harness.inner.upstream, list[str]()

    def changes(_: list[Any]) -> list[str]:
        found = list(new)
        new.clear()
        return found

    upstream.answers["eth_newPendingTransactionFilter"] = lambda _: "0xf1"
    upstream.answers["eth_getFilterChanges"] = changes
    upstream.answers["eth_getTransactionByHash"] = lambda params: transaction(params[0], A, B, 5)
    return new


def busy(_: list[Any]) -> Any:
    raise Refused(-32000, "try again")


async def watching(harness: EventHarness) -> Webhook:
    """A webhook for pending transactions, known to the watcher."""
    await harness.step()
    made = await harness.webhook("PENDING_TRANSACTION", addresses=["0x" + B.hex()])
    async with harness.inner.running.pool.connection() as connection, connection.transaction():
        await harness.events.watch.hold(connection)
    return made


@pytest.mark.parametrize("failures", [1, 2])
async def test_transactions_that_cannot_be_read_at_first_are_sent_later(harness: EventHarness, failures: int) -> None:
    new, upstream = mempool(harness), harness.inner.upstream
    await watching(harness)
    await harness.events.mempool.poll()
    new += HASHES
    read = upstream.answers["eth_getTransactionByHash"]
    upstream.answers["eth_getTransactionByHash"] = busy
    for _ in range(failures):
        with pytest.raises((RpcError, Fault)):
            await harness.events.mempool.poll()
    upstream.answers["eth_getTransactionByHash"] = read
    await harness.events.mempool.poll()
    assert sorted(each["data"]["transactionHash"] for each in await harness.bodies()) == HASHES


async def test_filter_survives_a_failed_poll_and_is_replaced_when_it_is_gone(harness: EventHarness) -> None:
    new, upstream = mempool(harness), harness.inner.upstream
    await watching(harness)
    await harness.events.mempool.poll()
    upstream.limited, upstream.limited_by, upstream.retry_after = 3, 500, None
    with pytest.raises(Fault):
        await harness.events.mempool.poll()
    upstream.limited = 0
    new += HASHES[:2]
    await harness.events.mempool.poll()
    assert upstream.count("eth_newPendingTransactionFilter") == 1
    changes = upstream.answers["eth_getFilterChanges"]

    def gone(_: list[Any]) -> Any:
        raise Refused(-32000, "filter not found")

    upstream.answers["eth_getFilterChanges"] = gone
    with pytest.raises(RpcError):
        await harness.events.mempool.poll()
    upstream.answers["eth_getFilterChanges"] = changes
    new += HASHES[2:]
    await harness.events.mempool.poll()
    assert upstream.count("eth_newPendingTransactionFilter") == 2
    assert len(await harness.bodies()) == 4


async def test_transactions_that_always_fail_do_not_hold_up_the_others(harness: EventHarness) -> None:
    new, upstream = mempool(harness), harness.inner.upstream
    await watching(harness)
    read = upstream.answers["eth_getTransactionByHash"]
    upstream.answers["eth_getTransactionByHash"] = busy
    new += HASHES[:1]
    for _ in range(2):
        with pytest.raises((RpcError, Fault)):
            await harness.events.mempool.poll()
    await harness.events.mempool.poll()
    upstream.answers["eth_getTransactionByHash"] = read
    new += HASHES[1:]
    await harness.events.mempool.poll()
    assert len(await harness.bodies()) == 3


async def test_webhook_is_listening_only_while_its_mempool_is_watched(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    mempool(harness)
    made = await watching(harness)
    seen = WebhookService(harness.store, *([None] * 2), most={}, values_per_day={}, follows=lambda _: True)  # type: ignore[arg-type]
    assert [each.is_listening for each in await seen._seen([made])] == [False]
    await harness.events.mempool.poll()
    assert [each.is_listening for each in await seen._seen([made])] == [True]
    # A killed follower leaves its row behind, and confirms it no more.
    await asyncio.sleep(0.01)
    monkeypatch.setattr(service_room, "MEMPOOL_SILENT_S", 0.0)
    assert [each.is_listening for each in await seen._seen([made])] == [False]
    monkeypatch.setattr(store, "CONFIRM_S", 0.0)
    monkeypatch.setattr(service_room, "MEMPOOL_SILENT_S", 60.0)
    await harness.events.mempool.poll()
    assert [each.is_listening for each in await seen._seen([made])] == [True]
    await harness.events.mempool._stop()
    assert [each.is_listening for each in await seen._seen([made])] == [False]
