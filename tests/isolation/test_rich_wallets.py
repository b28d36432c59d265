"""Reading a wallet with as many tokens as are ever listed: no step of the event loop is long, so others do not notice."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from proxy.services.tokens.evm_tokens import MOST_CONTRACTS
from tests.database import connected
from tests.http_client import Reply, request
from tests.isolation.loop_steps import LONGEST_STEP_S, LoopSteps, send_apart
from tests.service import until
from tests.web.worker import LIVE, Worker, on_uvloop, running_worker

# A program of its own, because its work is not the loop's: every contract is a token there.
CONTRACTS = Path(__file__).parents[2] / "bench" / "tools" / "contracts.py"
HEAD = 1_000_000
TRIES = 5
HOLDER = b"\xaa" * 20
WALLET = "0x" + HOLDER.hex()
MEMBERS = {"contract", "symbol", "name", "decimals", "balance", "formatted_balance", "usd_value", "logo_url"}


@asynccontextmanager
async def contracts() -> AsyncIterator[str]:
    """The URL of an upstream on which every contract is a token."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(CONTRACTS), stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def rich_wallet(url: str) -> AsyncIterator[Worker]:
    """A worker whose index has a holder of more tokens than are listed."""
    settings = {"url": url, "acquire_timeout_s": 30.0, "request_timeout_s": 30.0}
    own = {"quicknode_methods": True, "ankr_methods": True}
    async with connected(url) as connection, contracts() as upstream:
        await connection.execute(
            "insert into followed_networks (network, first_block, block, block_hash) values ($1, 0, $2, '')", LIVE, HEAD
        )
        rows = [(1, HOLDER, number.to_bytes(20, "big"), 1) for number in range(1, MOST_CONTRACTS + 2)]
        await connection.copy_records_to_table("token_holdings", records=rows)
        upstreams = {LIVE: [{"url": upstream}]}
        async with running_worker(upstreams, database=settings, rpc=own, follower={"networks": [LIVE]}) as worker:
            await worker.app.pool.open()
            await until(worker.app.pool.is_up)
            await worker.app.plane.trackers[LIVE].look()
            yield worker


async def measured(worker: Worker, raw: bytes) -> Reply:
    """The reply to a request that takes no long step of the loop. It is sent again if one was, because that may have been the
    machine's."""
    longest = []
    for _ in range(TRIES):
        with LoopSteps.measured() as steps:
            reply = await send_apart(worker.port, raw)
        assert reply.status == 200, reply
        longest.append(steps.longest_s)
        if steps.longest_s < LONGEST_STEP_S:
            return reply
    raise AssertionError(longest)


def call(worker: Worker, method: str, given: dict[str, Any]) -> bytes:
    body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": [given]})
    return request("POST", f"/v1/rpc/{LIVE}", body, key=worker.keys["main"])


@on_uvloop
async def test_balances_of_a_rich_wallet_are_read_in_short_steps(database: str) -> None:
    async with rich_wallet(database) as worker:
        path = f"/v1/tokens/ethereum/balances/{WALLET}?limit=100"
        found = (await measured(worker, request("GET", path, key=worker.keys["main"]))).json
        assert (found["total"], found["truncated"], len(found["tokens"])) == (MOST_CONTRACTS, True, 100)
        assert found["tokens"][0].keys() == MEMBERS
        contracts = [each["contract"].lower() for each in found["tokens"]]
        assert contracts == sorted(contracts), "equal values and symbols are in the order of their contracts"


@on_uvloop
async def test_own_methods_read_a_rich_wallet_in_short_steps(database: str) -> None:
    async with rich_wallet(database) as worker:
        listed = call(worker, "qn_getWalletTokenBalance", {"wallet": WALLET, "perPage": 100, "page": 100})
        assert len((await measured(worker, listed)).json["result"]["result"]) == 100
        last = {"walletAddress": WALLET, "blockchain": "eth", "pageToken": str(MOST_CONTRACTS - 100)}
        for given in (last, {**last, "onlyWhitelisted": True, "pageToken": ""}):
            reply = (await measured(worker, call(worker, "ankr_getAccountBalance", given))).json
            assert "result" in reply, reply
