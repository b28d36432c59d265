"""Processes that are killed while the service runs: callers should notice as little as possible."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from tests import service as service_room
from tests.flows.test_socket_clients import opened
from tests.http_client import Closed, HttpClient, close_all, post, queued_at, rpc, send_once, to_every_worker
from tests.service import Service, is_running, until

READ = rpc("eth_chainId")
# A part that died is back this soon, on a busy machine.
BACK_S = 20.0


@pytest.fixture(scope="module")
async def victim(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    running = await service_room.start(tmp_path_factory.mktemp("faults"), "--workers", "2")
    yield running
    assert await service_room.stop(running) == 0


@dataclass
class Traffic:
    """Counts of the requests on one busy connection."""

    answered: int = 0
    failed: int = 0


@asynccontextmanager
async def traffic(client: HttpClient, key: str) -> AsyncIterator[Traffic]:
    """Send requests on the connection one after the other, and count how they end."""
    seen = Traffic()

    async def send_calls() -> None:
        while True:
            try:
                reply = await client.call("eth_chainId", key=key)
            except Closed:
                seen.failed += 1
                return
            seen.answered += reply.status == 200
            seen.failed += reply.status != 200
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as group:
        sending = group.create_task(send_calls())
        yield seen
        sending.cancel()


async def test_killed_worker_is_replaced_and_the_others_do_not_notice(victim: Service) -> None:
    key = victim.keys["enterprise"]
    held = await to_every_worker(victim)
    (dead, lost), (_, kept) = [(pid, clients[0]) for pid, clients in held.items()]
    async with traffic(kept, key) as seen:
        before = seen.answered
        os.kill(dead, signal.SIGKILL)
        assert await lost.is_closed(within_s=BACK_S)
        await until(lambda: len(victim.worker_pids()) == 2 and dead not in victim.worker_pids(), within_s=BACK_S)
        await until(lambda: seen.answered > before + 20)
    assert seen.failed == 0
    await close_all(held)
    fresh = await to_every_worker(victim)
    for clients in fresh.values():
        assert (await clients[0].call(key=key)).status == 200
    await close_all(fresh)


async def test_connection_in_the_queue_of_a_killed_worker_is_served(victim: Service) -> None:
    """A stopped worker accepts no connections: those in the kernel's queue must survive its death."""
    key = victim.keys["enterprise"]
    dead = victim.worker_pids()[0]
    waiting = await queued_at(dead, victim.port, victim.worker_pids())
    await waiting.write(post(READ, key=key))
    os.kill(dead, signal.SIGKILL)
    assert (await waiting.reply(within_s=BACK_S)).status == 200
    await waiting.close()


async def test_killed_worker_does_not_refill_a_bucket(victim: Service) -> None:
    """Buckets are the host's: ten at once are not ten more for a restarted worker."""
    account = await victim.new_account()
    key = (await victim.new_key(account["id"]))["key"]
    data = post(READ, key=key)
    began = time.monotonic()
    admitted = 0
    for _ in range(30):
        admitted += (await send_once(victim, data)).status == 200
    dead = set(victim.worker_pids())
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: len(set(victim.worker_pids()) - dead) == 2, within_s=BACK_S)
    for _ in range(30):
        admitted += (await send_once(victim, data)).status == 200
    assert 10 <= admitted <= 10 + 10 * (time.monotonic() - began)


async def test_service_without_workers_for_a_moment_loses_no_new_connection(victim: Service) -> None:
    key = victim.keys["enterprise"]
    dead = victim.worker_pids()
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    replies = await asyncio.gather(*(send_once(victim, post(READ, key=key)) for _ in range(10)))
    assert [reply.status for reply in replies] == [200] * 10


def postmaster(victim: Service) -> int:
    return victim.child_pid("bin/postgres")


async def is_degraded(victim: Service) -> bool:
    return bool((await (await victim.get("/readyz")).json())["degraded"])


async def is_whole(victim: Service) -> bool:
    return not await is_degraded(victim)


async def changes_arrive(victim: Service, account: str, held: dict[int, list[HttpClient]]) -> None:
    """A new key works in every worker, and its revocation arrives there."""
    made = await victim.new_key(account)
    for status in (200, 401):
        if status == 401:
            await victim.cli_json("keys", "revoke", made["id"])
        for clients in held.values():
            await until(lambda client=clients[0], status=status: _returns(client, made["key"], status))


async def _returns(client: HttpClient, key: str, status: int) -> bool:
    return (await client.call("eth_chainId", key=key)).status == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_known_keys_are_served_while_postgres_restarts(victim: Service, number: signal.Signals) -> None:
    """After a kill or an orderly stop, Postgres comes back, no known key is refused, and changes still arrive."""
    account = (await victim.new_account("growth"))["id"]
    held = await to_every_worker(victim)
    old = postmaster(victim)
    async with traffic(next(iter(held.values()))[0], victim.keys["enterprise"]) as seen:
        os.kill(old, number)
        await until(lambda: not is_running(old), within_s=BACK_S)
        await until(lambda: _answers(victim), within_s=BACK_S)
        before = seen.answered
        await until(lambda: seen.answered > before + 20)
    assert seen.failed == 0
    assert postmaster(victim) != old
    await changes_arrive(victim, account, held)
    await close_all(held)


async def _answers(victim: Service) -> bool:
    done = await victim.cli("accounts", "list")
    return done.returncode == 0


@contextmanager
def without_postgres(victim: Service) -> Iterator[None]:
    """Kill it, and keep it from starting: its control file is elsewhere for a while."""
    control = victim.data / "postgres" / "global" / "pg_control"
    aside = control.with_suffix(".aside")
    control.rename(aside)
    try:
        os.kill(postmaster(victim), signal.SIGKILL)
        yield
    finally:
        aside.rename(control)


async def test_service_goes_on_while_postgres_is_away_for_longer(victim: Service) -> None:
    """Known keys of an account with a daily limit are served too; unknown ones are refused; a worker's death is survived."""
    account = await victim.new_account("growth")
    known = (await victim.new_key(account["id"]))["key"]
    held = await to_every_worker(victim)
    (dead, lost), (_, kept) = [(pid, clients[0]) for pid, clients in held.items()]
    for client in (lost, kept):
        await until(lambda client=client: _returns(client, known, 200))
    with without_postgres(victim):
        await until(lambda: is_degraded(victim), within_s=BACK_S)
        for _ in range(50):
            assert (await kept.call(key=known)).status == 200
        assert (await kept.call(key=known[:-1] + "!")).status == 401
        failed = await victim.cli("accounts", "list")
        assert failed.returncode == 2
        assert len(failed.stderr.splitlines()) == 1
        os.kill(dead, signal.SIGKILL)
        assert await lost.is_closed(within_s=BACK_S)
        assert (await kept.call(key=known)).status == 200
    await until(lambda: _answers(victim), within_s=BACK_S)
    await until(lambda: len(victim.worker_pids()) == 2 and dead not in victim.worker_pids(), within_s=BACK_S)
    await close_all(held)
    fresh = await to_every_worker(victim)
    await until(lambda: is_whole(victim), within_s=BACK_S)
    await changes_arrive(victim, account["id"], fresh)
    await close_all(fresh)


async def test_requests_on_credit_are_paid_back_when_postgres_returns(victim: Service) -> None:
    account = await victim.new_account("free", "--requests-per-second", "1000", "--units-per-second", "1000")
    key = (await victim.new_key(account["id"]))["key"]
    async with await HttpClient.open(victim.port) as client:
        await until(lambda: _returns(client, key, 200))
        with without_postgres(victim):
            for _ in range(300):
                assert (await client.call("eth_chainId", key=key)).status == 200
        await until(lambda: _answers(victim), within_s=BACK_S)
        assert (await client.call("eth_chainId", key=key)).status == 200

        async def is_paid() -> bool:
            return bool((await victim.cli_json("accounts", "show", account["id"]))["used_today"] >= 300)

        await until(is_paid, within_s=BACK_S)


async def test_killed_chain_is_started_again(victim: Service) -> None:
    old = victim.child_pid("hardhat")
    os.kill(old, signal.SIGKILL)

    async def answers() -> bool:
        return (await victim.rpc("eth_chainId")).status == 200

    await until(lambda: not is_running(old))
    await until(answers, within_s=BACK_S)


async def test_stopping_workers_close_their_sockets_with_1012(victim: Service) -> None:
    clients = [await opened(victim, victim.keys["enterprise"]) for _ in range(8)]
    for client in clients:
        await client.result("eth_subscribe", "newHeads")
    pids = victim.worker_pids()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for client in clients:
        code, reason = await client.closed()
        assert code == 1012
        assert "fromBlock" in reason
    await until(lambda: len(victim.worker_pids()) == 2 and not set(victim.worker_pids()) & set(pids), within_s=BACK_S)

    async def is_back() -> bool:
        try:
            again = await opened(victim, victim.keys["enterprise"])
        except (aiohttp.ClientError, OSError):
            return False
        return bool(await again.result("eth_subscribe", "newHeads"))

    await until(is_back, within_s=BACK_S)
