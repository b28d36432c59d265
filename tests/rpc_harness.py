"""A worker, its upstreams and fault proxies between them, in the event loop of the test; and a load that checks every reply."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.core.fleet import state_of
from proxy.services.rpc.networks import Route
from proxy.services.rpc.tracker import Tracker
from tests.faults import FaultProxy, fault_proxy
from tests.http_client import Reply, rpc
from tests.rpc_upstreams import Chain, ScriptedUpstream, scripted, value_of
from tests.service import until
from tests.web.worker import LIVE, ChunkedClient, Worker, running_worker

# Makes each call of a load unique.
_serial = itertools.count()


@dataclass
class Load:
    """The outcomes of the calls of a load."""

    took_s: list[float] = field(default_factory=list)
    # The CPU time of this process between each call and its reply: a busy machine does not change it.
    cpu_s: list[float] = field(default_factory=list)
    wrong: list[Any] = field(default_factory=list)
    failed: list[Reply] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.took_s)

    def quantile_s(self, share: float) -> float:
        return sorted(self.took_s)[min(int(share * self.calls), self.calls - 1)]

    def __repr__(self) -> str:
        p50, p99 = self.quantile_s(0.5) * 1000, self.quantile_s(0.99) * 1000
        worst = max(self.took_s) * 1000
        return (
            f"<Load {self.calls} calls, {len(self.failed)} failed, {len(self.wrong)} wrong; "
            f"p50 {p50:.1f} p99 {p99:.1f} max {worst:.0f} ms>"
        )


class NetworkHarness:
    """One network of a worker, whatever its upstreams are."""

    def __init__(self, running: Worker, network: str) -> None:
        self.worker = running
        self.proxies: list[FaultProxy] = []
        self.network = network
        self.route: Route = running.app.networks.routes[network]
        self.tracker: Tracker = running.app.plane.trackers[network]

    @property
    def states(self) -> list[str]:
        """The state of each upstream, as operators see it."""
        now = time.monotonic()
        return [state_of(upstream.health, now) for upstream in self.route.upstreams]

    async def look(self) -> None:
        """Poll the heads once."""
        await self.tracker.look()

    async def shows(self, *states: str) -> None:
        """Poll until the upstreams are in these states: a reply that took long counts from the next poll on."""

        async def is_so() -> bool:
            if self.states != [*states]:
                await self.look()
            return self.states == [*states]

        await until(is_so)

    def watch(self) -> None:
        """Poll the heads from now on, as the product does."""
        self.worker.app.tasks.start(f"heads {self.network}", self.tracker.run)

    async def call(self, method: str, params: Sequence[Any] | Mapping[str, Any] = (), **options: Any) -> Reply:
        return await self.worker.send(rpc(method, params), network=self.network, **options)

    async def result(self, method: str, params: Sequence[Any] | Mapping[str, Any] = (), **options: Any) -> Any:
        reply = await self.call(method, params, **options)
        assert reply.status == 200, reply
        assert "result" in reply.json, reply.json
        return reply.json["result"]

    async def batch(self, *calls: tuple[str, Sequence[Any]], **options: Any) -> Reply:
        body = [{"jsonrpc": "2.0", "id": n, "method": m, "params": list(p)} for n, (m, p) in enumerate(calls)]
        return await self.worker.send(orjson.dumps(body), network=self.network, **options)


class RpcHarness(NetworkHarness):
    def __init__(self, running: Worker, chain: Chain, upstreams: list[ScriptedUpstream], network: str) -> None:
        super().__init__(running, network)
        self.chain = chain
        self.upstreams = upstreams

    @property
    def asked(self) -> int:
        """Calls that reached the upstreams, without those about the head."""
        return sum(
            1 for each in self.upstreams for call in each.calls if call.method not in ("eth_blockNumber", "net_version")
        )

    def count(self, method: str, params: Sequence[Any] | None = None) -> int:
        """Calls of a method at all upstreams; with `params`, only calls with these."""
        calls = [call for each in self.upstreams for call in each.calls if call.method == method]
        return len([call for call in calls if params is None or call.params == list(params)])

    async def load(self, calls: int, *, at_once: int = 16) -> Load:
        """Make so many reads over `at_once` connections, and check every reply."""
        load = Load()
        left = itertools.repeat(None, calls)
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._call_on(await self.worker.connect(), left, load))
        return load

    async def _call_on(self, client: ChunkedClient, left: itertools.repeat[None], load: Load) -> None:
        async with client:
            for _ in left:
                params = [{"to": "0x" + "11" * 20, "data": hex(next(_serial))}, "latest"]
                began, used = time.monotonic(), time.process_time()
                reply = await client.send(self.worker.post(rpc("eth_call", params), network=self.network))
                load.took_s.append(time.monotonic() - began)
                load.cpu_s.append(time.process_time() - used)
                if reply.status != 200 or "result" not in reply.json:
                    load.failed.append(reply)
                elif reply.json["result"] != value_of("eth_call", params):
                    load.wrong.append((params, reply.json))


@asynccontextmanager
async def rpc_harness(
    count: int = 3,
    *,
    faults: bool = False,
    network: str = LIVE,
    chain: Chain | None = None,
    kind: type[ScriptedUpstream] = ScriptedUpstream,
    options: Sequence[Mapping[str, Any]] = (),
    **sections: Any,
) -> AsyncIterator[RpcHarness]:
    """A worker with `count` upstreams whose heads are known; with `faults`, each behind a fault proxy."""
    chain = chain or Chain()
    async with AsyncExitStack() as stack:
        upstreams = await stack.enter_async_context(scripted(count, chain, kind))
        proxies = [await stack.enter_async_context(fault_proxy(each.port)) for each in upstreams] if faults else []
        urls = [each.url for each in proxies or upstreams]
        given = [
            {"url": url, **more}
            for url, more in zip(urls, itertools.chain(options, itertools.repeat({})), strict=False)
        ]
        running = await stack.enter_async_context(running_worker({network: given}, **sections))
        harness = RpcHarness(running, chain, upstreams, network)
        chain.identity = harness.route.network.identity
        harness.proxies = proxies
        await harness.look()
        yield harness
