"""Polling the head of each upstream a few times per block, so that lagging upstreams are avoided and old replies discarded.

Probes bypass admission and routing and go straight to their upstream, never behind calls that wait. A failed probe does not
count against the upstream: its traffic shows its health better. One upstream is also polled for the hash of its head, because
numbers alone do not show a reorganisation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from hashlib import blake2b

from proxy.core import jsonrpc
from proxy.core.heads import HIGHEST
from proxy.services.rpc.flights import next_id
from proxy.services.rpc.networks import Route
from proxy.wire.http1 import ReplyHead
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection

# Heads are polled twice per block within these bounds, so that fast chains are not flooded and slow ones not neglected.
SHORTEST_S = 0.5
LONGEST_S = 6.0
# How long an upstream may take to report its head, and how long the reports of others wait for it.
REPLY_S = 3.0
PATIENCE_S = 0.25


class Probe:
    """One call to one upstream. Its result is None if the call failed."""

    client = ""

    def __init__(self, upstream: Upstream, method: str, params: bytes = b"[]") -> None:
        self._id = b"%d" % next_id()
        self._upstream = upstream
        self._body = b"".join((jsonrpc.HEAD, self._id, jsonrpc.request_tail(method), params, b"}"))
        self._result: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def send(self) -> bytes | None:
        self._upstream.probe(self, self._body)
        try:
            async with asyncio.timeout(REPLY_S):
                return await self._result
        except TimeoutError:
            self._upstream.leave(self)
            return None

    def on_reply(self, connection: UpstreamConnection, head: ReplyHead, body: bytes) -> None:
        try:
            reply = jsonrpc.read_reply(body, self._id)
        except ValueError:
            self._settle(None)
            return
        self._settle(bytes(reply.result) or None)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._settle(None)

    def on_large(self, connection: UpstreamConnection, head: ReplyHead, beginning: Piece) -> bool:
        return False

    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...
    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None: ...

    def _settle(self, result: bytes | None) -> None:
        if not self._result.done():
            self._result.set_result(result)


class Tracker:
    """Tracks the heads of one network's upstreams."""

    def __init__(self, route: Route, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
        self._state = route.state
        self._clock = clock
        self._every_s = min(max(route.network.facts.block_time_s / 2, SHORTEST_S), LONGEST_S)

    def __repr__(self) -> str:
        return f"<Tracker {self._route.network.id} every {self._every_s:g} s>"

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self.look()
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Poll all upstreams at once and update the head. Slow upstreams are taken into account when they reply."""
        async with asyncio.TaskGroup() as group:
            polls = [group.create_task(self._poll(upstream)) for upstream in self._route.upstreams]
            # At first there is no head to compare reports with, and the fastest upstream alone could be far behind or wrong.
            await asyncio.wait(polls, timeout=PATIENCE_S if self._route.heads.agreed else REPLY_S)
            self._state.observe_heads(self._clock())
            group.create_task(self._check_for_reorg())
            group.create_task(self._identify_chain())
        self._state.observe_heads(self._clock())

    async def _poll(self, upstream: Upstream) -> None:
        health = upstream.health
        began = self._clock()
        if began < health.rests_until:
            return
        number = self._number(await Probe(upstream, *self._state.head_reader.number_call).send())
        now = self._clock()
        if number is None:
            health.fell_silent(now)
            return
        health.spoke(now - began, now)
        health.saw_head(number, now)

    async def _check_for_reorg(self) -> None:
        """Poll the hash of the head. The same upstream is polled for as long as it is the first of those at the tip: two
        upstreams that see different forks are no reorganisation."""
        call = self._state.head_reader.block_call
        upstream = next(filter(self._is_at_the_tip, self._route.upstreams), None)
        if call is None or upstream is None:
            return
        result = await Probe(upstream, *call).send()
        block = None if result is None else self._state.head_reader.read_block(result)
        if block is not None:
            self._state.saw_block(upstream.health.index, *block)

    async def _identify_chain(self) -> None:
        """Identify the chain for the shared cache, which outlives this process."""
        cache = self._state.shared_cache
        upstream = next(filter(self._is_at_the_tip, self._route.upstreams), None)
        if cache is None or cache.chain or upstream is None:
            return
        reader = self._state.head_reader
        first = await Probe(upstream, *reader.genesis_call).send()
        if first is not None and first != jsonrpc.NULL:
            cache.chain = blake2b(reader.read_genesis(first), digest_size=8).hexdigest()

    def _number(self, result: bytes | None) -> int | None:
        number = None if result is None else self._state.head_reader.read_number(result)
        return number if number is not None and 0 <= number <= HIGHEST else None

    def _is_at_the_tip(self, upstream: Upstream) -> bool:
        health = upstream.health
        if health.silent or self._clock() < health.rests_until:
            return False
        return health.head >= self._route.heads.agreed > 0
