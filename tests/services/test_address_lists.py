"""The longest lists of addresses of webhooks: read, written and shown in short steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from proxy.chains.evm.address import checksum
from proxy.errors import InvalidRequest
from proxy.services.webhooks.webhooks import WebhookChange, WebhookService, read_config
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.webhooks import NewWebhook, Webhook, WebhookStore
from proxy.turn_queue import TurnQueue, turns_of_task
from tests.isolation.loop_steps import LONGEST_STEP_S, LoopSteps

COUNT = 99_999
KIND = "address_activity"


def addresses(count: int, start: int = 1) -> list[str]:
    """With their checksums, which nothing remembers."""
    listed = [checksum((number << 96 | number).to_bytes(20, "big")) for number in range(start, start + count)]
    checksum.cache_clear()
    return listed


async def made(store: WebhookStore, listed: Sequence[bytes]) -> Webhook:
    new = NewWebhook(
        account="acct_1", network="dev/mainnet", live=True, url="https://h.example/", event_type=KIND, config={}
    )
    return await store.create(store.new_id(), new, addresses=listed, secret=b"sealed", most=9, values_per_day=0)


@pytest.fixture
async def service(pool: Pool) -> WebhookService:
    async with pool.connection() as connection:
        await connection.execute(
            "insert into accounts (id, name, email, plan) values ('acct_1', 'N', 'n@e.com', 'free')"
        )
    store = WebhookStore(pool)
    return WebhookService(store, *([None] * 2), most={}, values_per_day={}, follows=lambda _: True)  # type: ignore[arg-type]


async def test_longest_list_of_addresses_never_takes_a_long_step(service: WebhookService) -> None:
    turns_of_task.set(TurnQueue(asyncio.get_running_loop()))
    given, others, longest_s = addresses(COUNT), addresses(COUNT, 1 << 40), []
    for _ in range(3):
        checksum.cache_clear()
        with LoopSteps.measured() as steps:
            listed = await read_config(KIND, {"addresses": given})
            assert listed is not None
            webhook = await made(service._store, listed)
            shown = [each async for part in service.addresses(webhook) for each in part]
            delta = await service._delta(webhook, WebhookChange(add=others, remove=given))
            assert delta is not None
        longest_s.append(steps.longest_s)
        assert {*shown} == {*given}
        assert (len(delta.add), len(delta.remove)) == (COUNT, COUNT)
    # Sets and lists of this size take a few milliseconds when they are freed.
    assert min(longest_s) < 2 * LONGEST_STEP_S, longest_s


async def test_addresses_are_read_once_each_and_in_order(service: WebhookService) -> None:
    one, two, three = addresses(3)
    found = await read_config(KIND, {"addresses": [two, one, two.lower()]})
    assert [*(found or ())] == [bytes.fromhex(t[2:]) for t in (two, one)]
    webhook = await made(service._store, [bytes.fromhex(one[2:])])
    delta = await service._delta(webhook, WebhookChange(add=[two, two], remove=[two, three, three]))
    assert delta is not None
    assert ([*delta.add], [*delta.remove]) == ([bytes.fromhex(two[2:])], [bytes.fromhex(three[2:])])
    with pytest.raises(InvalidRequest, match=r"config\.addresses\.401"):
        await read_config(KIND, {"addresses": [*addresses(401), "0x"]})
