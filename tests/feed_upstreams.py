"""Fake upstreams with HTTP and a WebSocket, serving a chain that keeps every block it ever had, with parents, logs and forks.

An upstream can be killed and restarted, go silent, fall behind, or stay on a fork. Tests compare the events of a listener
with the chain by block hash: see `RecordingListener`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from aiohttp import WSMsgType, web

from proxy.chains.evm import log_filter
from proxy.chains.evm.head_reader import UNKNOWN_PARENT
from proxy.core.usage import Tally
from proxy.errors import Fault
from proxy.services.feed.evm_feed import EvmFeed
from proxy.services.feed.topics import FeedEvent, NetworkFeed, Topic
from tests.rpc_upstreams import Chain, Refused, ScriptedUpstream, value_of
from tests.service import until
from tests.web.worker import Worker, running_worker

# A network with four blocks per second, so that intervals measured in block times are short.
QUICK = "arbitrum/mainnet"
HEADS = Topic("newHeads")
# The contracts and events of this chain.
CONTRACTS = [f"0x{n:040x}" for n in range(0xC0, 0xC4)]
EVENTS = [f"0x{n:064x}" for n in range(0xE0, 0xE3)]
NO_BLOOM = "0x" + "00" * 256
SOME_BLOOM = "0x" + "01" * 256


@dataclass
class ForkingChain(Chain):
    """`canonical` lists the block hashes of the canonical chain."""

    head: int = 0
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    canonical: list[str] = field(default_factory=list)
    upstreams: list[FeedUpstream] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self._make(0)

    def hash_of(self, number: int) -> str:
        return self.canonical[number]

    def _make(self, logs: int) -> None:
        """Append a block."""
        self.made += 1
        number = len(self.canonical)
        parent = self.canonical[-1] if self.canonical else "0x" + "00" * 32
        name = value_of("block", self.name, self.made, parent)
        self.blocks[name] = {
            "number": hex(number),
            "hash": name,
            "parentHash": parent,
            "timestamp": hex(1_700_000_000 + number),
            "gasUsed": "0x5208",
            "gasLimit": "0x1c9c380",
            "baseFeePerGas": "0x7",
            "logsBloom": SOME_BLOOM if logs else NO_BLOOM,
            "transactions": [value_of("tx", name)],
            "uncles": [],
            "size": "0x220",
        }
        self.logs[name] = [self._log(name, number, index) for index in range(logs)]
        self.canonical.append(name)
        self.head = number

    def _log(self, block: str, number: int, index: int) -> dict[str, Any]:
        return {
            "address": CONTRACTS[(number + index) % 4],
            "topics": [EVENTS[index % 3], "0x" + f"{number:064x}"],
            "data": value_of("log", block, index),
            "blockNumber": hex(number),
            "blockHash": block,
            "transactionHash": value_of("tx", block),
            "transactionIndex": "0x0",
            "logIndex": hex(index),
            "removed": False,
        }

    async def mine(self, count: int = 1, *, logs: int = 2) -> None:
        for _ in range(count):
            self._make(logs)
            await self._announce()

    async def replace_blocks(self, depth: int, *, longer: int = 1, logs: int = 2, at_once: bool = False) -> None:
        """Replace the last blocks and add more. Each new block is announced, as geth does it; with `at_once` only the last."""
        del self.canonical[-depth:]
        for _ in range(depth + longer):
            self._make(logs)
        await self._announce(only_last=at_once)

    async def _announce(self, *, only_last: bool = False) -> None:
        for upstream in self.upstreams:
            new = upstream.new_heads()
            for name in new[-1:] if only_last else new:
                await upstream.notify_head(name)

    def logs_of(self, matching: Callable[[dict[str, Any]], bool], first: int = 0) -> list[tuple[str, str]]:
        """The matching logs of the canonical chain, as (block hash, log index)."""
        found = itertools.chain.from_iterable(self.logs[name] for name in self.canonical[first:])
        return [(log["blockHash"], log["logIndex"]) for log in found if matching(log)]


class FeedUpstream(ScriptedUpstream):
    """One upstream. `ws` is its WebSocket URL."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        if isinstance(chain, ForkingChain):
            chain.upstreams.append(self)
        # This upstream's own view of the chain while it does not follow the others.
        self.frozen: list[str] | None = None
        self._seen: set[str] = set()
        # Streams stay open but send nothing.
        self.mute = False
        self.subscriptions: dict[Any, tuple[web.WebSocketResponse, str, list[Any]]] = {}
        self.subscribed = 0
        self._sockets: dict[web.WebSocketResponse, web.Request] = {}
        self._site: web.TCPSite | None = None
        self.application.router.add_get("/", self._serve_socket)

    @property
    def forking_chain(self) -> ForkingChain:
        return cast(ForkingChain, self.chain)

    @property
    def canonical(self) -> list[str]:
        if self.frozen is not None:
            return self.frozen
        return self.forking_chain.canonical[: len(self.forking_chain.canonical) - self.behind]

    @property
    def head(self) -> int:
        return len(self.canonical) - 1 if isinstance(self.chain, ForkingChain) else super().head

    def new_heads(self) -> list[str]:
        """The blocks that became visible here since the last call."""
        new = [name for name in self.canonical if name not in self._seen]
        self._seen.update(new)
        return new

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    async def open(self) -> None:
        if self._site is None:
            await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Stop listening and reset open connections."""
        assert self._site is not None
        await self._site.stop()
        self.cut()

    def cut(self) -> None:
        """Reset all streams."""
        for request in tuple(self._sockets.values()):
            if request.transport is not None:
                request.transport.abort()
        self.subscriptions.clear()

    async def close(self) -> None:
        self.cut()
        await super().close()

    # The socket

    async def _serve_socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._sockets[socket] = request
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await self._answer_on(socket, orjson.loads(message.data))
        except ConnectionError:
            pass
        finally:
            del self._sockets[socket]
            self.subscriptions = {name: each for name, each in self.subscriptions.items() if each[0] is not socket}
        return socket

    async def _answer_on(self, socket: web.WebSocketResponse, call: dict[str, Any]) -> None:
        if isinstance(call, list):
            await socket.send_str(orjson.dumps([await self._reply(each) for each in call]).decode())
            return
        reply = await self._reply(call)
        if call["method"].lower().endswith("subscribe") and "error" not in reply:
            self._note(socket, call, reply)
        await socket.send_str(orjson.dumps(reply).decode())

    def _note(self, socket: web.WebSocketResponse, call: dict[str, Any], reply: dict[str, Any]) -> None:
        if "nsubscribe" in call["method"]:
            reply["result"] = self.subscriptions.pop(call["params"][0], None) is not None
            return
        self.subscribed += 1
        reply["result"] = self.subscription_id(self.subscribed)
        self.subscriptions[reply["result"]] = (socket, call["method"], call["params"])

    def subscription_id(self, serial: int) -> Any:
        return hex(0x5000 + serial)

    def notification_method(self, method: str) -> str:
        return "eth_subscription"

    async def notify(self, matching: Callable[[str, list[Any]], bool], result: Any) -> None:
        """Send a notification to every matching subscription."""
        for name, (socket, method, params) in tuple(self.subscriptions.items()):
            if self.mute or not matching(method, params):
                continue
            body = {
                "jsonrpc": "2.0",
                "method": self.notification_method(method),
                "params": {"subscription": name, "result": result},
            }
            try:
                await socket.send_str(orjson.dumps(body).decode())
            except ConnectionError:
                self.subscriptions.pop(name, None)

    async def notify_head(self, name: str) -> None:
        block = self.forking_chain.blocks[name]
        head = {member: value for member, value in block.items() if member not in ("transactions", "uncles", "size")}
        await self.notify(lambda _, params: params == ["newHeads"], head)

    # Replies

    def _eth_getBlockByNumber(self, params: list[Any]) -> dict[str, Any] | None:
        number = self._number(params[0])
        return self.forking_chain.blocks[self.canonical[number]] if number <= self.head else None

    def _eth_getBlockByHash(self, params: list[Any]) -> dict[str, Any] | None:
        """Blocks of other forks are served as well, up to this upstream's height."""
        block = self.forking_chain.blocks.get(params[0])
        return None if block is None or int(block["number"], 16) > self.head else block

    def _eth_getLogs(self, params: list[Any]) -> list[dict[str, Any]]:
        query = params[0]
        if "blockHash" in query:
            if self._eth_getBlockByHash([query["blockHash"]]) is None:
                raise Refused(-32000, "unknown block")
            return self.forking_chain.logs[query["blockHash"]]
        first, last = self._number(query.get("fromBlock")), self._number(query.get("toBlock"))
        names = self.canonical[first : last + 1]
        found = itertools.chain.from_iterable(self.forking_chain.logs[name] for name in names)
        given = {name: value for name, value in query.items() if name in ("address", "topics")}
        return [log for log in found if matches(log_filter.parse(given), log)]

    def _eth_syncing(self, params: list[Any]) -> bool:
        return False


def matches(wanted: log_filter.LogFilter, log: dict[str, Any]) -> bool:
    given = wanted.params()
    addresses, places = given.get("address"), given.get("topics", [])
    return (not addresses or log["address"] in addresses) and (
        len(places) <= len(log["topics"])
        and all(not any_of or topic in any_of for any_of, topic in zip(places, log["topics"], strict=False))
    )


@dataclass(eq=False)
class RecordingListener:
    """Records events and checks them: no head without its parent, no log twice, no removal of a log that was not sent."""

    events: list[FeedEvent] = field(default_factory=list)
    # How often a replay waited for room.
    room_requests: int = 0
    # The faults that ended the subscription.
    ended: list[Fault] = field(default_factory=list)

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        self.events += events

    def on_end(self, why: Fault) -> None:
        self.ended.append(why)

    async def room(self) -> None:
        self.room_requests += 1

    # Its calls cost nothing.
    account = ""

    def charge(self, units: int, tally: Tally) -> bool:
        return True

    async def wait_for_units(self) -> None: ...

    @property
    def results(self) -> list[Any]:
        return [orjson.loads(event.result) for event in self.events]

    @property
    def hashes(self) -> list[str]:
        return [head["hash"] for head in self.results]

    def heads(self) -> list[str]:
        """The chain that a client builds from the heads: each head follows one it already has. One that reports no parent, as
        some of a development chain do, follows the head before it."""
        chain: list[str] = []
        start = self.results[0]["parentHash"] if self.events else ""
        for head in self.results:
            while chain and head["parentHash"] not in (chain[-1], UNKNOWN_PARENT):
                chain.pop()
            assert chain or head["parentHash"] == start, "a head whose parent was never sent"
            assert head["hash"] not in chain, "a head was sent twice"
            chain.append(head["hash"])
        return chain

    def logs(self) -> list[tuple[str, str]]:
        """The logs that a client holds: added at the end and removed from the end."""
        held: list[tuple[str, str]] = []
        for log in self.results:
            name = (log["blockHash"], log["logIndex"])
            if log["removed"]:
                assert held, "a log was removed that was never sent"
                assert held.pop() == name
            else:
                assert name not in held, "a log was sent twice"
                held.append(name)
        return held


def logs_topic(**members: Any) -> Topic:
    return Topic("logs", log_filter.parse(members))


class FeedHarness:
    def __init__(self, running: Worker, chain: ForkingChain, upstreams: list[FeedUpstream], network: str) -> None:
        self.worker = running
        self.chain = chain
        self.upstreams = upstreams
        self.network = network

    @property
    def feed(self) -> NetworkFeed:
        found = self.worker.app.feeds.find(self.network)
        assert found is not None
        return found

    @property
    def evm(self) -> EvmFeed:
        return cast(EvmFeed, self.feed)

    def count(self, method: str) -> int:
        return sum(each.count(method) for each in self.upstreams)

    async def listen(self, topic: Topic, from_block: int | None = None) -> RecordingListener:
        listener = RecordingListener()
        if from_block is None:
            await self.feed.subscribe(topic, listener)
        else:
            await self.feed.subscribe_from(topic, listener, from_block)
        return listener

    async def until_received(self, listener: RecordingListener, name: str, within_s: float = 20.0) -> None:
        """Wait until the listener has received this block's head or one of its logs."""
        mark = name.encode()
        await until(lambda: any(mark in event.result for event in reversed(listener.events)), within_s=within_s)

    async def until_tip(self, listener: RecordingListener, within_s: float = 20.0) -> None:
        await self.until_received(listener, self.chain.canonical[-1], within_s)


@asynccontextmanager
async def feed_harness(
    kinds: Iterable[str],
    *,
    network: str = QUICK,
    blocks: int = 10,
    chain: Chain | None = None,
    kind: type[FeedUpstream] = FeedUpstream,
    **sections: Any,
) -> AsyncIterator[FeedHarness]:
    """Start a worker whose network has upstreams of these kinds, `ws` or `http`, in this order of preference."""
    chain = chain or ForkingChain()
    if isinstance(chain, ForkingChain):
        await chain.mine(blocks)
    async with AsyncExitStack() as stack:
        upstreams = []
        for _ in kinds:
            upstream = kind(chain)
            await upstream.open()
            if isinstance(chain, ForkingChain):
                upstream.new_heads()
            stack.push_async_callback(upstream.close)
            upstreams.append(upstream)
        given = [
            {"url": each.ws if name == "ws" else each.url, "tier": tier}
            for tier, (name, each) in enumerate(zip(kinds, upstreams, strict=True))
        ]
        running = await stack.enter_async_context(running_worker({network: given}, **sections))
        chain.identity = running.app.networks.routes[network].network.identity
        yield FeedHarness(running, cast(ForkingChain, chain), upstreams, network)
