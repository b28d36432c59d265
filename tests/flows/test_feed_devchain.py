"""The feed of a real chain, Hardhat's node, over WebSocket and HTTP. Events are compared with the chain's own blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.dev.chain import development_chain
from proxy.dev.funded_accounts import FUNDED
from proxy.services.feed.topics import NetworkFeed, Topic
from tests.feed_upstreams import HEADS, RecordingListener, logs_topic
from tests.service import node_session, until
from tests.web.worker import on_uvloop, running_worker

DEV = "dev/mainnet"
# Contract code that emits one log with topic 1, and the code that deploys it.
EMITS = "600160006000a100"
DEPLOYS = "0x67" + EMITS + "6000526008" + "6018f3"
TOPIC = f"0x{1:064x}"


class DevChain:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def call(self, method: str, *params: Any) -> Any:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self._session.post(self.url, json=call) as response:
            reply = await response.json()
        assert "result" in reply, reply
        return reply["result"]

    async def send(self, **transaction: Any) -> dict[str, Any]:
        """Send a transaction, which is mined in its own block, and return the receipt."""
        name = await self.call("eth_sendTransaction", {"from": FUNDED.address, **transaction})
        receipt: dict[str, Any] = await self.call("eth_getTransactionReceipt", name)
        return receipt

    async def hashes(self, first: int) -> list[str]:
        last = int(await self.call("eth_blockNumber"), 16)
        blocks = [await self.call("eth_getBlockByNumber", hex(number), False) for number in range(first, last + 1)]
        return [block["hash"] for block in blocks]

    async def logs(self, first: int) -> list[tuple[str, str]]:
        found = await self.call("eth_getLogs", {"fromBlock": hex(first), "toBlock": "latest"})
        return [(log["blockHash"], log["logIndex"]) for log in found]


@asynccontextmanager
async def dev_chain(directory: Path) -> AsyncIterator[DevChain]:
    child, url = development_chain(directory, directory / "chain.log")
    await child.start()
    try:
        async with node_session() as session:
            yield DevChain(url, session)
    finally:
        await child.stop()


async def listen(feed: NetworkFeed, topic: Topic, first: int | None = None) -> RecordingListener:
    listener = RecordingListener()
    await (feed.subscribe(topic, listener) if first is None else feed.subscribe_from(topic, listener, first))
    return listener


@pytest.mark.parametrize("kinds", [["ws", "http"], ["http"]])
@on_uvloop
async def test_heads_logs_and_pending_transactions_of_a_real_chain(tmp_path: Path, kinds: list[str]) -> None:
    async def fork(chain: DevChain, contract: str) -> None:
        """Mine blocks with logs, remove them, and mine more in their place."""
        snapshot = await chain.call("evm_snapshot")
        for _ in range(3):
            await chain.send(to=contract)
        assert await chain.call("evm_revert", snapshot) is True
        for _ in range(4):
            await chain.send(to=contract, value="0x0", data="0x01")

    async with dev_chain(tmp_path) as chain:
        urls = [chain.url.replace("http", "ws") if kind == "ws" else chain.url for kind in kinds]
        async with running_worker({DEV: urls}) as running:
            feed = running.app.feeds.find(DEV)
            assert feed is not None
            contract = (await chain.send(data=DEPLOYS))["contractAddress"]
            await chain.send(to=contract)
            start = int(await chain.call("eth_blockNumber"), 16) + 1
            heads, all_events = await listen(feed, HEADS), await listen(feed, logs_topic(topics=[TOPIC]))
            other = await listen(feed, logs_topic(address="0x" + "77" * 20))
            pending = await listen(feed, Topic("newPendingTransactions", False))
            for _ in range(5):
                await chain.send(to=contract)
            await until(lambda: len(all_events.events) == 5)
            await until(lambda: len(pending.events) == 5)
            # Replay everything, then reorganise the last three blocks.
            replayed = await listen(feed, logs_topic(address=contract), 1)
            assert replayed.logs() == await chain.logs(1)
            expected = {
                "heads": await chain.hashes(start),
                "logs": await chain.logs(start),
            }
            await until(lambda: heads.heads() == expected["heads"])
            assert all_events.logs() == expected["logs"]
            # Some of so many blocks report no parent.
            await chain.call("hardhat_mine", "0x14")
            await fork(chain, contract)
            canonical, logs, all_logs = await chain.hashes(start), await chain.logs(start), await chain.logs(1)
            await until(lambda: heads.heads() == canonical, within_s=30)
            await until(lambda: all_events.logs() == logs)
            await until(lambda: replayed.logs() == all_logs)
            assert other.events == []
