"""One account's flood of requests that use the database: other accounts do not notice, and the flood gets 429 or its turn."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import orjson
import pytest

from proxy.store.postgres.pool import COMMAND_S
from tests.database import Server, connected
from tests.http_client import REPLY_S, HttpClient, Reply, request
from tests.service import until
from tests.web.worker import LIVE, Worker, running_worker

# Requests of the attacker at once, as in the flood that found the fault.
FLOOD = 200
CALLS = 60


@asynccontextmanager
async def service(url: str, **settings: float) -> AsyncIterator[Worker]:
    """A worker whose keys have accounts in the database: `main` and `attacker`."""
    async with running_worker({LIVE: ["http://127.0.0.1:1"]}, database={"url": url, **settings}) as worker:
        worker.add_key("attacker")
        async with connected(url) as connection:
            row = "insert into accounts (id, name, email, plan) values ($1, $1, $1, 'enterprise')"
            await connection.executemany(row, [("acc_1",), ("acc_2",)])
        await worker.app.pool.open()
        yield worker


async def send(worker: Worker, path: str, *, key: str, body: bytes = b"", within_s: float = REPLY_S) -> Reply:
    async with await HttpClient.open(worker.port) as client:
        return await client.send(request("POST" if body else "GET", path, body, key=worker.keys[key]), within_s)


async def calls_beside(worker: Worker, path: str, *attack: str) -> tuple[Counter[int], list[Reply]]:
    """The statuses of the good account's calls, one after the other, and the replies to the flood beside them."""
    seen: Counter[int] = Counter()
    async with asyncio.TaskGroup() as group:
        flood = [group.create_task(send(worker, each, key="attacker")) for each in attack for _ in range(FLOOD)]
        await asyncio.sleep(0.05)
        for _ in range(CALLS):
            seen[(await send(worker, path, key="main")).status] += 1
    return seen, [each.result() for each in flood]


async def test_flood_of_one_account_does_not_fail_another(database: str) -> None:
    async with service(database) as worker:
        seen, flood = await calls_beside(worker, "/v1/wallets", "/v1/wallets", "/v1/webhooks")
        assert seen == {200: CALLS}
        assert {reply.status for reply in flood} <= {200, 429, 503}
        # On a slow machine the flood may wait for its connections for too long.
        messages = {reply.json["error"]["message"] for reply in flood if reply.status == 503}
        assert messages <= {"all database connections are in use; try again shortly"}


async def test_slow_statements_of_one_account_do_not_fail_another(database: str) -> None:
    """The attacker's statements wait for a lock. They end after their time, and others still find connections."""
    async with service(database) as worker, connected(database) as connection, connection.transaction():
        await connection.execute("lock table webhooks in access exclusive mode")
        seen, flood = await calls_beside(worker, "/v1/wallets", "/v1/webhooks")
        assert seen == {200: CALLS}
        assert {reply.status for reply in flood} == {429, 503}
        refused = next(reply for reply in flood if reply.status == 429)
        assert "wait for replies" in refused.fault(429)["message"]
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-compute-units"] == "0"
        messages = {reply.json["error"]["message"] for reply in flood if reply.status == 503}
        assert messages <= {
            "the database did not answer in time; try again shortly",
            "all database connections are in use; try again shortly",
        }


async def test_sign_in_flood_does_not_fail_an_account(database: str) -> None:
    """A request without a key counts for its address."""
    async with service(database) as worker:
        body = orjson.dumps({"email": "a@example.com", "password": "not the password"})

        async def sign_in() -> int:
            async with await HttpClient.open(worker.port) as client:
                return (await client.send(request("POST", "/v1/account/sign-in", body))).status

        async with asyncio.TaskGroup() as group:
            flood = [group.create_task(sign_in()) for _ in range(FLOOD // 2)]
            await asyncio.sleep(0.05)
            seen = Counter([(await send(worker, "/v1/wallets", key="main")).status for _ in range(CALLS)])
        assert seen == {200: CALLS}
        assert 500 not in {each.result() for each in flood}
        assert 503 not in {each.result() for each in flood}


@contextmanager
def stopped(*processes: int) -> Iterator[None]:
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


async def test_frozen_database_is_a_503_within_the_time_of_a_request(server: Server, database: str) -> None:
    """Sessions that are open do not answer, and no new one is accepted."""
    async with service(database, request_timeout_s=0.5, acquire_timeout_s=0.5) as worker:
        assert (await send(worker, "/v1/wallets", key="main")).status == 200
        sessions = "select pid from pg_stat_activity where datname = $1"
        backends = [row["pid"] for row in await server.admin.fetch(sessions, database.partition("?")[0].split("/")[-1])]
        assert backends
        directory = await server.admin.fetchval("show data_directory")
        postmaster = int((Path(directory) / "postmaster.pid").read_text().split("\n")[0])
        with stopped(postmaster, *backends):
            # More than there are connections. A statement alone may take longer than this: see COMMAND_S.
            calls = (send(worker, "/v1/wallets", key="main", within_s=COMMAND_S) for _ in range(30))
            replies = await asyncio.gather(*calls)
        words = {reply.fault(503)["message"] for reply in replies if reply.status != 429}
        assert "the database did not answer in time; try again shortly" in words

        async def is_back() -> bool:
            return (await send(worker, "/v1/wallets", key="main")).status == 200

        await until(is_back)


async def test_read_only_database_is_a_503_without_a_traceback(database: str, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(database) as connection:
        name = await connection.fetchval("select current_database()")
        await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    caplog.set_level(logging.INFO)
    async with running_worker({LIVE: ["http://127.0.0.1:1"]}, database={"url": database}) as worker:
        await worker.app.pool.open()
        body = orjson.dumps({"owner": "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "chain": "ethereum"})
        for _ in range(5):
            reply = await send(worker, "/v1/wallets/create", key="main", body=body)
            assert reply.fault(503)["message"] == "the database is not reachable at the moment; try again shortly"
        assert (await send(worker, "/v1/wallets", key="main")).status == 200
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == ["the database refuses statements"]
    assert not any(record.exc_info for record in caplog.records)
