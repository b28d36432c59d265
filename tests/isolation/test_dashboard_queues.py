"""Usage queries and password hashes: one account, or a flood of strangers, leaves room for others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.errors import RateLimited, Unavailable
from proxy.processes import worker
from proxy.services.accounts.account_mails import AccountMails
from proxy.services.accounts.second_factor import SecondFactor
from proxy.services.accounts.sign_in import MOST_WAITING, SignIn
from proxy.services.usage import READ_PER_ACCOUNT, UsageService
from proxy.settings import load
from proxy.store.postgres.pool import Pool
from proxy.store.postgres.second_factors import SecondFactorStore
from proxy.store.postgres.secrets import Vault
from proxy.store.postgres.sessions import SessionStore
from proxy.store.postgres.usage import UsageStore
from proxy.tasks import Tasks
from proxy.wire.mailer import Mailer
from tests.web.worker import PEPPER

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
SETTINGS = load(environ={}, overrides={"database": {"url": NOWHERE}, "keys": {"pepper": PEPPER}})


@asynccontextmanager
async def in_the_background(group: asyncio.TaskGroup, usage: UsageService, account: str) -> AsyncIterator[None]:
    """Queries of the account that run or wait until the block ends."""
    ended = asyncio.Event()

    async def query() -> None:
        async with usage._reading_slot(account):
            await ended.wait()

    for _ in range(READ_PER_ACCOUNT):
        group.create_task(query())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        ended.set()


async def test_usage_queries_of_one_account_leave_a_slot_for_others() -> None:
    pool = Pool.of(SETTINGS.database)
    usage = UsageService(UsageStore(pool), [], flush_s=1.0, keep_s={})
    async with asyncio.TaskGroup() as group, in_the_background(group, usage, "acc_1"):
        async with asyncio.timeout(30), usage._reading_slot("acc_2"):
            pass
        with pytest.raises(RateLimited):
            async with usage._reading_slot("acc_1"):
                pass


async def test_flood_of_strangers_keeps_no_known_place_from_signing_in() -> None:
    settings = SETTINGS.dashboard
    pool = Pool.of(SETTINGS.database)
    store, factors = SessionStore(pool, pepper=PEPPER), SecondFactorStore(pool, Vault(PEPPER))
    sign_in = SignIn(store, SecondFactor(factors), settings, AccountMails(Mailer(SETTINGS.mail), Tasks()))
    ended = threading.Event()
    async with asyncio.TaskGroup() as group:
        try:
            for _ in range(MOST_WAITING):
                group.create_task(sign_in._in_thread(ended.wait, is_known=False))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await sign_in._in_thread(lambda: True, is_known=False)
            async with asyncio.timeout(30):
                assert await sign_in._in_thread(lambda: True, is_known=True)
        finally:
            ended.set()


def test_worker_lets_threads_give_way_to_its_loop() -> None:
    before = sys.getswitchinterval()
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, before)
        worker.yield_often()
        assert sys.getswitchinterval() < before / 10
