"""Polling the head of each upstream, so that upstreams that lag are avoided and replies from before it are discarded.

Probes bypass admission and routing and go straight to their upstream, never behind calls that wait. A failed probe does not
count against the upstream: its traffic shows its health better. A probe returns the number and the hash of the newest block,
because numbers alone do not show a reorganisation. A network that is in use is polled every second at least.

An upstream must prove that it belongs here. Before its first call, and now and then afterwards, it names its chain: one of
another chain takes no calls. In each round the upstreams' hashes are compared at one height (`ForkSearch`): one on another
branch takes no calls either. Upstreams that carry subscriptions only are checked too (`StreamChecks`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from proxy.core import jsonrpc
from proxy.core.heads import HIGHEST, heard_of
from proxy.core.upstream_health import Standing, UpstreamHealth
from proxy.errors import Unavailable
from proxy.services.rpc.fork_search import ForkSearch
from proxy.services.rpc.networks import Route
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.stream_checks import StreamChecks
from proxy.tasks import Tasks, until_set
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.heads")

# Heads of a network that is not in use are polled twice per block within these bounds.
SHORTEST_S = 0.5
LONGEST_S = 6.0
# While a network is in use, or has recent replies cached, it is polled at least this often.
IN_USE_S = 1.0
# A network is in use for this long after its last call.
USED_FOR_S = 30.0
# How long a process waits for the first reports before it starts without them.
START_S = 4.0
# How long the reports of some upstreams wait for the others.
PATIENCE_S = 0.25
# How often an upstream names its chain, besides each time that it was silent.
NAMES_CHAIN_S = 60.0

_NEWS: dict[Standing, tuple[int, str]] = {
    "good": (logging.INFO, "upstream agrees with the network"),
    "unchecked": (logging.INFO, "upstream has not named its chain"),
    "wrong_chain": (logging.ERROR, "upstream serves another chain: it gets no calls"),
    "forked": (logging.WARNING, "upstream is on another branch than the network: it gets no calls"),
}


async def start_tracking(trackers: Iterable[Tracker], tasks: Tasks) -> None:
    """Start these trackers, and wait until each has polled its upstreams once."""
    found = list(trackers)
    for tracker in found:
        tracker.withhold()
        tasks.start(f"heads {tracker.network_id}", tracker.run)
    try:
        async with asyncio.timeout(START_S), asyncio.TaskGroup() as group:
            for tracker in found:
                group.create_task(tracker.is_ready.wait())
    except TimeoutError:
        pass


class Tracker:
    """Tracks the heads of one network's upstreams."""

    def __init__(self, route: Route, clock: Callable[[], float] = time.monotonic) -> None:
        self.network_id = route.network.id
        self._route = route
        self._state = route.state
        self._clock = clock
        self._idle_s = min(max(route.network.facts.block_time_s / 2, SHORTEST_S), LONGEST_S)
        self._forks = ForkSearch(route, clock)
        self._streams = StreamChecks(route, clock)
        # When each upstream last named its chain, and which of them are being polled.
        self._named_at: dict[int, float] = {}
        self._polled: set[int] = set()
        self._uses = 0
        self._used_at = -math.inf
        self._wake = asyncio.Event()
        self.is_ready = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Tracker {self.network_id} every {self._every_s(self._clock()):g} s>"

    def withhold(self) -> None:
        """Let no upstream take calls before it has named its chain."""
        if self._route.network.identity and self._state.head_reader.chain_call is not None:
            for upstream in self._route.every_upstream:
                upstream.health.stand("unchecked", self._clock())

    async def run(self) -> None:
        """A supervised loop."""
        async with asyncio.TaskGroup() as group:
            while True:
                began = self._clock()
                await self._look(
                    group, [each for each in self._route.upstreams if each.health.index not in self._polled]
                )
                self.is_ready.set()
                if self._route.streams:
                    group.create_task(self._check_streams())
                await self._rest(began)

    async def look(self) -> None:
        """Poll all upstreams at once and update the head."""
        async with asyncio.TaskGroup() as group:
            await self._look(group, self._route.upstreams)
        self._state.observe_heads(self._clock())
        await self._check_streams()

    async def newest(self) -> int:
        """Poll the heads now. Returns the newest block of any upstream, and raises Unavailable if none replies."""
        began = self._clock()
        await self.look()
        now, heads = self._clock(), self._route.heads
        found = [each.head for each in heard_of(self._state.group.members, now) if each.head_at >= began]
        if not found:
            raise Unavailable(f"no upstream of {self.network_id} reports its head at the moment: try again")
        return max([heads.tip, *[number for number in found if heads.is_plausible(number, now)]])

    def wake(self) -> None:
        """Poll again soon: an upstream has announced a new block, which the others may have too."""
        self._wake.set()

    # Intervals

    def _every_s(self, now: float) -> float:
        return min(self._idle_s, IN_USE_S) if self.is_in_use(now) else self._idle_s

    def is_in_use(self, now: float) -> bool:
        """Whether there were calls lately, or recent replies are cached."""
        replies = self._state.replies
        calls = sum([member.good + member.bad + member.inflight for member in self._state.group.members])
        uses = replies.hits + replies.misses + calls
        if uses != self._uses:
            self._uses, self._used_at = uses, now
        return replies.has_recent or now - self._used_at < USED_FOR_S

    async def _rest(self, began: float) -> None:
        """Wait for the next round. A network that comes into use meanwhile is polled earlier."""
        while (left_s := began + self._every_s(now := self._clock()) - now) > 0:
            if await until_set(self._wake, within_s=min(left_s, IN_USE_S)):
                self._wake.clear()
                # Quick chains announce several blocks a second.
                await asyncio.sleep(max(0.0, began + SHORTEST_S - self._clock()))
                return

    # Polls

    async def _look(self, group: asyncio.TaskGroup, upstreams: Sequence[Upstream]) -> None:
        """Slow upstreams are taken into account in the round after their reply."""
        polls = [group.create_task(self._poll(upstream)) for upstream in upstreams]
        if polls:
            # At first there is no head to compare reports with, and the fastest upstream alone could be far behind or wrong.
            await asyncio.wait(polls, timeout=PATIENCE_S if self._route.heads.agreed else None)
        for health, standing in (await self._forks.verdicts()).items():
            self._stand(health, standing)
        self._state.observe_heads(self._clock())
        group.create_task(self._identify_chain())

    async def _poll(self, upstream: Upstream) -> None:
        health = upstream.health
        if self._clock() < health.rests_until:
            return
        self._polled.add(health.index)
        try:
            if await self._is_our_chain(upstream):
                await self._read_head(upstream)
        finally:
            self._polled.discard(health.index)

    async def _read_head(self, upstream: Upstream) -> None:
        health, reader, began = upstream.health, self._state.head_reader, self._clock()
        call = reader.head_block_call
        block, probe = None, None
        if call is not None and health.may_serve(call[0]):
            probe = Probe(upstream, *call)
            block = reader.read_block(await probe.send() or b"")
        if block is None and (probe is None or probe.is_answered):
            number = reader.read_number(await Probe(upstream, *reader.number_call).send() or b"")
            block = None if number is None else (number, "", "")
        now = self._clock()
        if block is None or not 0 <= block[0] <= HIGHEST:
            health.fell_silent(now)
            return
        health.spoke(now - began, now)
        health.saw_head(block[0], now, block[1], block[2])

    # Chains and branches

    async def _is_our_chain(self, upstream: Upstream) -> bool:
        health, now = upstream.health, self._clock()
        expected, call = self._route.network.identity, self._state.head_reader.chain_call
        is_known = health.standing in ("good", "forked")
        is_due = health.silent or not is_known or now - self._named_at.get(health.index, -math.inf) >= NAMES_CHAIN_S
        if not expected or call is None or not is_due:
            return True
        probe = Probe(upstream, *call)
        result = await probe.send()
        if not probe.is_answered:
            if not is_known:
                health.fell_silent(self._clock())
            return is_known
        self._named_at[health.index] = now
        # An upstream that refuses this call cannot be checked.
        is_ours = result is None or self._state.head_reader.read_chain(result) == expected
        if not is_ours:
            self._stand(health, "wrong_chain")
        elif health.standing == "wrong_chain":
            self._stand(health, "unchecked")
        return is_ours

    async def _check_streams(self) -> None:
        for health, standing in (await self._streams.verdicts()).items():
            self._stand(health, standing)

    def _stand(self, health: UpstreamHealth, standing: Standing) -> None:
        was = health.standing
        if not health.stand(standing, self._clock()):
            return
        if was == "good" and health in self._state.group.members:
            self._state.distrust()
        if (was, standing) != ("unchecked", "good"):
            level, news = _NEWS[standing]
            log.log(level, news, extra={"network": self.network_id, "upstream": health.label})

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

    def _is_at_the_tip(self, upstream: Upstream) -> bool:
        health = upstream.health
        if health.silent or health.standing != "good" or self._clock() < health.rests_until:
            return False
        return health.head >= self._route.heads.agreed > 0
