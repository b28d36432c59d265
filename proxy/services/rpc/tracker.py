"""How far each upstream is: asked a few times per block, so that those behind are left out and old answers are dropped.

The question goes past admission and routing, straight to the upstream it is about. An upstream that does not answer is not
punished here: its traffic says more. One upstream is also asked which block its head is: numbers alone show no reorganisation.
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

# Twice per block, within these bounds: a fast chain must not be flooded, a slow one not forgotten.
SHORTEST_S = 0.5
LONGEST_S = 6.0
# How long an upstream may take to say where it is; and how long the others' answers wait for it.
ANSWER_S = 3.0
PATIENCE_S = 0.25


class Probe:
    """One question to one upstream; its result, or None."""

    def __init__(self, upstream: Upstream, method: str, params: bytes = b"[]") -> None:
        self._id = b"%d" % next_id()
        self._upstream = upstream
        self._body = b"".join((jsonrpc.HEAD, self._id, jsonrpc.request_tail(method), params, b"}"))
        self._answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    async def ask(self) -> bytes | None:
        self._upstream.submit(self, self._body)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer
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
        if not self._answer.done():
            self._answer.set_result(result)


class Tracker:
    """The heads of one network's upstreams."""

    def __init__(self, route: Route, clock: Callable[[], float] = time.monotonic) -> None:
        self._route = route
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
        """Ask all upstreams at once, and draw the conclusions; the slow ones are heard when they speak."""
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._look_at(upstream)) for upstream in self._route.upstreams]
            # At first nothing is known that a report could be measured by: the quickest alone could be far behind, or lie.
            await asyncio.wait(asked, timeout=PATIENCE_S if self._route.heads.agreed else ANSWER_S)
            self._route.observe_heads(self._clock())
            group.create_task(self._look_for_reorg())
            group.create_task(self._tell_chain())
        self._route.observe_heads(self._clock())

    async def _look_at(self, upstream: Upstream) -> None:
        health = upstream.health
        began = self._clock()
        if began < health.rests_until:
            return
        number = self._number(await Probe(upstream, *self._route.head_reader.number_call).ask())
        now = self._clock()
        if number is None:
            health.fell_silent(now)
            return
        health.spoke(now - began, now)
        health.saw_head(number, now)

    async def _look_for_reorg(self) -> None:
        """Another block at the same height: what was answered from the old one is void. The same upstream is asked again as
        long as it is the first of those at the tip: two that see different forks are not a reorganisation."""
        call = self._route.head_reader.block_call
        upstream = next(filter(self._is_at_the_tip, self._route.upstreams), None)
        if call is None or upstream is None:
            return
        result = await Probe(upstream, *call).ask()
        block = None if result is None else self._route.head_reader.read_block(result)
        if block is not None:
            self._route.saw_block(upstream.health.index, *block)

    async def _tell_chain(self) -> None:
        """Which chain it is, for those who keep its answers longer than we live."""
        shared_cache = self._route.shared_cache
        upstream = next(filter(self._is_at_the_tip, self._route.upstreams), None)
        if shared_cache is None or shared_cache.chain or upstream is None:
            return
        reader = self._route.head_reader
        first = await Probe(upstream, *reader.genesis_call).ask()
        if first is not None and first != jsonrpc.NULL:
            shared_cache.chain = blake2b(reader.read_genesis(first), digest_size=8).hexdigest()

    def _number(self, result: bytes | None) -> int | None:
        number = None if result is None else self._route.head_reader.read_number(result)
        return number if number is not None and 0 <= number <= HIGHEST else None

    def _is_at_the_tip(self, upstream: Upstream) -> bool:
        health = upstream.health
        if health.silent or self._clock() < health.rests_until:
            return False
        return health.head >= self._route.heads.agreed > 0
