"""Polling the head of each upstream, so that calls avoid upstreams that lag, and cached replies from before a new head are
discarded.

Probes bypass admission and routing and go straight to their upstream, never behind calls that wait. A failed probe does not
count against the upstream: its traffic shows its health better. A probe returns the number and the hash of the newest block,
because numbers alone do not show a reorganisation. A network that is in use is polled every second at least. The processes of
a host share their polls (`SharedPolls`): one of them polls an upstream, and the others adopt what it finds.

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

from proxy.chains.lookups import Lookup, ReportedBlock, Values, number_of, text_of
from proxy.core.heads import HIGHEST, HeadDoubts, heard_of
from proxy.core.upstream_health import Standing, UpstreamHealth
from proxy.errors import Unavailable
from proxy.services.rpc.bound_checks import BoundChecks
from proxy.services.rpc.fork_search import ForkSearch
from proxy.services.rpc.method_checks import MethodChecks
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.probing import look_up
from proxy.services.rpc.shared_polls import SHORTEST_S, SharedPolls
from proxy.services.rpc.stream_checks import StreamChecks
from proxy.store.shared_memory.poll_table import HeadPoll, PollTable
from proxy.tasks import Tasks, until_set
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.heads")

# Heads of a network that is not in use are polled twice per block, within these bounds. Quick chains would otherwise cost many
# calls for nothing, and an upstream that leaves the network's branch should be found before the next call.
IDLE_S, LONGEST_S = 2.0, 6.0
# While a network is in use, or has recent replies cached, it is polled at least this often.
IN_USE_S = 1.0
# A network is in use for this long after its last call.
USED_FOR_S = 30.0
# How long a process waits for the first reports before it starts without them.
START_S = 4.0
# How long the reports of some upstreams wait for the others.
PATIENCE_S = 0.25
# Upstreams that are due within this time of each other are polled in one round, so that their hashes can be compared.
TOGETHER_S = 0.1
# Older findings are not adopted: they were made before this process started, by processes that have ended.
FRESH_S = 10.0
# How often an upstream names its chain, besides each time that it was silent.
NAMES_CHAIN_S = 60.0
# How often an upstream is asked for its status, and how soon again if it does not answer.
STATUS_S, STATUS_AGAIN_S = 60.0, 5.0

_NEWS: dict[Standing, tuple[int, str]] = {
    "good": (logging.INFO, "upstream agrees with the network"),
    "unchecked": (logging.INFO, "upstream has not named its chain"),
    "wrong_chain": (logging.ERROR, "upstream serves another chain: it gets no calls"),
    "wrong_version": (logging.ERROR, "upstream serves another version of the API than the first one: it gets no calls"),
    "forked": (logging.WARNING, "upstream is on another branch than the network: it gets no calls"),
}


async def start_tracking(trackers: Iterable[Tracker], tasks: Tasks) -> None:
    """Start these trackers, and wait until each has polled its upstreams once."""
    started = list(trackers)
    for tracker in started:
        tracker.withhold()
        tasks.start("heads", tracker.run, of=tracker.network_id)
    try:
        async with asyncio.timeout(START_S), asyncio.TaskGroup() as group:
            for tracker in started:
                group.create_task(tracker.is_ready.wait())
    except TimeoutError:
        pass


class Tracker:
    """Tracks the heads of one network's upstreams."""

    def __init__(
        self, state: NetworkState, clock: Callable[[], float] = time.monotonic, *, table: PollTable | None = None
    ) -> None:
        """`table`: the polls of all processes of the host."""
        self.network_id = state.network.id
        self._state = state
        self._lookups = state.head_reader.lookups
        self._clock = clock
        half_s = state.network.facts.block_time_s / 2
        self._in_use_s = min(max(half_s, SHORTEST_S), IN_USE_S)
        self._idle_s = min(max(half_s, IDLE_S), LONGEST_S)
        self._polls = SharedPolls(state.network, self._state.group.members, table)
        self._forks = ForkSearch(state, self._polls, clock)
        self._streams = StreamChecks(state, clock)
        self._bounds = BoundChecks(state, self._polls, clock)
        self._methods = MethodChecks(state, clock)
        # When each upstream last named its chain, and which of them are being polled.
        self._named_at: dict[int, float] = {}
        # The version of the API that upstreams must have, and when it was found.
        self._version, self._version_at = "", -math.inf
        self._polled: set[int] = set()
        # When each upstream was last asked for its status.
        self._status_at: dict[int, float] = {}
        # When the head that another process found was adopted, for each upstream.
        self._adopted_at: dict[int, float] = {}
        self._uses = 0
        self._used_at = -math.inf
        self._doubts = HeadDoubts()
        self._wake = asyncio.Event()
        self._woken_at = -math.inf
        self.is_ready = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Tracker {self.network_id} every {self._every_s(self._clock()):g} s>"

    def withhold(self) -> None:
        """Let no upstream take calls before it has named its chain."""
        if self._state.network.identity and self._lookups.chain is not None:
            for upstream in self._state.every_upstream:
                upstream.health.set_standing("unchecked", self._clock())

    async def run(self) -> None:
        """A supervised loop."""
        self._state.on_doubt.append(self.doubt)
        try:
            await self._run()
        finally:
            self._state.on_doubt.remove(self.doubt)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                began = self._clock()
                self._begin_with_news(began)
                if self._doubts.check_at <= began:
                    await self._check_doubt(group)
                else:
                    await self._look(group, self._due(began))
                if self._state.heads.is_doubtful(self._state.group.members, self._clock()):
                    self._doubts.doubt(self._state.heads.tip)
                self.is_ready.set()
                if self._state.streams:
                    group.create_task(self._check_streams())
                if self._lookups.status is not None:
                    group.create_task(self._check_status(self._lookups.status))
                if self.is_in_use(began):
                    group.create_task(self._methods.check())
                if self._state.old_data:
                    group.create_task(self._bounds.check())
                await self._rest(began)

    def adopt(self) -> None:
        """Apply what other processes have found. Before the head is known, the next round does so for all upstreams at once."""
        if self._state.heads.agreed and self._adopt_news(now := self._clock()):
            self._observe_heads(now)

    async def look(self) -> None:
        """Poll all upstreams at once and update the head."""
        async with asyncio.TaskGroup() as group:
            await self._look(group, self._state.upstreams)
        self._observe_heads(self._clock())
        if self._lookups.status is not None:
            await self._check_status(self._lookups.status)
        await self._check_streams()

    async def newest(self) -> int:
        """Poll the heads now. Returns the newest block of any upstream, and raises Unavailable if none replies."""
        began = self._clock()
        await self.look()
        now, heads = self._clock(), self._state.heads
        numbers = [each.head for each in heard_of(self._state.group.members, now) if each.head_at >= began]
        if not numbers:
            raise Unavailable(f"no upstream of {self.network_id} reports its head at the moment: try again")
        return max([heads.tip, *[number for number in numbers if heads.is_plausible(number, now)]])

    async def find_bounds(self) -> None:
        """Find the oldest blocks of all upstreams, for each kind of data."""
        await self._bounds.check_all()

    async def find_bounds_of(self, upstream: Upstream) -> None:
        """The same for one that is not in use."""
        await self._bounds.find(upstream)

    async def find_methods(self) -> None:
        """Find the client of each upstream, and methods that it does not have."""
        await self._methods.check()

    def wake(self) -> None:
        """Poll again soon: an upstream has announced a new block, which the others may have too."""
        self._woken_at = self._clock()
        self._wake.set()

    def doubt(self) -> None:
        """Poll all upstreams at once: the chain may have gone back to a shorter branch."""
        if self._doubts.doubt(self._state.heads.tip):
            self._wake.set()

    async def _check_doubt(self, group: asyncio.TaskGroup) -> None:
        await self._look(group, [each for each in self._state.upstreams if each.health.index not in self._polled])
        self._doubts.checked(self._state.heads.tip, self._clock())

    # Intervals

    def _every_s(self, now: float) -> float:
        return self._in_use_s if self.is_in_use(now) else self._idle_s

    def is_in_use(self, now: float) -> bool:
        """Whether there were calls lately, or recent replies are cached."""
        replies = self._state.replies
        calls = sum([member.good + member.bad + member.inflight for member in self._state.group.members])
        uses = replies.hits + replies.misses + calls
        if uses != self._uses:
            self._uses, self._used_at = uses, now
        return replies.has_recent or now - self._used_at < USED_FOR_S

    def _due(self, now: float) -> list[Upstream]:
        """The upstreams to poll. While no head is known, that is all of them, whatever other processes find."""
        free = [each for each in self._state.upstreams if each.health.index not in self._polled]
        if not self._state.heads.agreed:
            return free
        return [each for each in free if self._is_due(each.health, now)]

    def _is_due(self, health: UpstreamHealth, now: float) -> bool:
        return health.standing == "unchecked" or self._due_at(health, now) <= now + TOGETHER_S

    def _due_at(self, health: UpstreamHealth, now: float) -> float:
        return max(health.rests_until, self._polls.due_at(health, self._every_s(now), self._woken_at))

    async def _rest(self, began: float) -> None:
        """Wait for the next round. A network that comes into use meanwhile is polled earlier."""
        while (left_s := self._next_round_at(began, now := self._clock()) - now) > 0:
            if await until_set(self._wake, within_s=min(left_s, IN_USE_S)):
                self._wake.clear()

    def _next_round_at(self, began: float, now: float) -> float:
        return min(self._doubts.check_at, self._next_polls_at(began, now))

    def _next_polls_at(self, began: float, now: float) -> float:
        healths = [each.health for each in self._state.upstreams if each.health.index not in self._polled]
        if not healths or not self._state.heads.agreed:
            return began + self._every_s(now)
        due_at = min([self._due_at(health, now) for health in healths])
        # Quick chains announce several blocks a second.
        return max(due_at, began + SHORTEST_S)

    # Polls

    async def _look(self, group: asyncio.TaskGroup, upstreams: Sequence[Upstream]) -> None:
        """Slow upstreams are taken into account in the round after their reply."""
        began = self._clock()
        polls = [group.create_task(self._poll(upstream, began)) for upstream in upstreams]
        if polls:
            # At first there is no head to compare reports with, and the fastest upstream alone could be far behind or wrong.
            await asyncio.wait(polls, timeout=PATIENCE_S if self._state.heads.agreed else None)
            for health, standing in (await self._forks.verdicts()).items():
                self._set_standing(health, standing)
        self._observe_heads(self._clock())
        if self._state.shared_cache is not None and not self._state.shared_cache.chain:
            group.create_task(self._identify_chain())

    def _observe_heads(self, now: float) -> None:
        # Another worker may have published the same head already, which then is no news.
        self._state.stay_current()
        self._state.observe_heads(now)

    async def _poll(self, upstream: Upstream, now: float) -> None:
        health = upstream.health
        if now < health.rests_until:
            return
        self._polled.add(health.index)
        self._polls.begin(health, now)
        try:
            block, took_s = None, 0.0
            if await self._is_our_chain(upstream):
                began = self._clock()
                block = await self._newest_block(upstream)
                took_s = self._clock() - began
                self._note(health, block, took_s)
            self._polls.end(health, block, took_s, self._clock())
        finally:
            self._polled.discard(health.index)

    async def _newest_block(self, upstream: Upstream) -> ReportedBlock | None:
        block, is_answered = None, True
        lookup = self._lookups.head
        if lookup is not None and upstream.health.may_serve(lookup.calls[0].method):
            answer = await look_up(upstream, lookup)
            block, is_answered = lookup.block(answer.values or {}), answer.is_answered
        if block is None and is_answered:
            lookup = self._lookups.number
            block = lookup.block((await look_up(upstream, lookup)).values or {})
        return block if block is not None and 0 <= block[0] <= HIGHEST else None

    def _note(self, health: UpstreamHealth, block: ReportedBlock | None, took_s: float) -> None:
        now = self._clock()
        if block is None:
            health.head_poll_failed(now)
            return
        health.head_reported(took_s, now)
        self._state.head_reported(health, block, now, asked_at=now - took_s)

    # Polls of other processes

    def _begin_with_news(self, now: float) -> None:
        """A process that starts needs no poll if others have found all heads."""
        self._adopt_news(now)
        members = self._state.group.members
        if not self._state.heads.agreed and len(heard_of(members, now)) == len(members):
            self._observe_heads(now)

    def _adopt_news(self, now: float) -> bool:
        """Returns whether a poll has ended or a standing has changed."""
        is_new = False
        for health, known, poll in self._polls.news():
            if now - poll.ended >= FRESH_S:
                continue
            if poll.standing and poll.judged_at > known.judged_at:
                is_new |= self._change_standing(health, poll.standing)
            if poll.ended > known.ended:
                is_new = True
                self._adopt(health, poll, now)
        return is_new

    def _adopt(self, health: UpstreamHealth, poll: HeadPoll, now: float) -> None:
        if poll.is_silent:
            if not health.silent:
                health.head_poll_failed(now)
            return
        if poll.head < 0:
            return
        health.head_reported(poll.took_s, now)
        # Calls of this process may have seen a newer head since; but a head that was adopted was found by an earlier poll.
        is_later = health.head_at == self._adopted_at.get(health.index)
        block = poll.head, poll.block_hash, poll.parent_hash
        self._state.head_reported(health, block, now, asked_at=now if is_later else poll.ended - poll.took_s)
        self._adopted_at[health.index] = now

    # Chains and branches

    async def _is_our_chain(self, upstream: Upstream) -> bool:
        health, now = upstream.health, self._clock()
        expected, lookup = self._state.network.identity, self._lookups.chain
        is_known = health.standing in ("good", "forked")
        is_due = health.silent or not is_known or now - self._named_at.get(health.index, -math.inf) >= NAMES_CHAIN_S
        if not expected or lookup is None or not is_due:
            return True
        answer = await look_up(upstream, lookup, self._identity_block(lookup))
        if not answer.is_answered:
            if not is_known:
                health.head_poll_failed(self._clock())
            return is_known
        self._named_at[health.index] = now
        # An upstream that refuses this call cannot be checked. A refusal takes back nothing that it said before.
        if answer.values is None:
            is_ours = health.standing != "wrong_chain"
        else:
            is_ours = lookup.identity(answer.values) == expected
        if not is_ours:
            self._set_standing(health, "wrong_chain")
        elif not await self._has_our_version(upstream):
            self._set_standing(health, "wrong_version")
            return False
        elif health.standing in ("wrong_chain", "wrong_version"):
            self._set_standing(health, "unchecked")
        return is_ours

    async def _has_our_version(self, upstream: Upstream) -> bool:
        """Whether its results have the form of the other upstreams' results. That of the first upstream that answers counts, so
        that all processes come to the same verdict."""
        lookup = self._lookups.version
        if lookup is None:
            return True
        if self._clock() - self._version_at >= NAMES_CHAIN_S:
            for each in self._state.upstreams:
                if version := await self._version_of(each, lookup):
                    self._version, self._version_at = version, self._clock()
                    break
        return await self._version_of(upstream, lookup) in ("", self._version)

    async def _version_of(self, upstream: Upstream, lookup: Lookup) -> str:
        values = (await look_up(upstream, lookup)).values or {}
        return text_of(values.get("version", b""))

    def _identity_block(self, lookup: Lookup) -> Values:
        return lookup.given(self._state.network.facts.genesis_at, "at")

    async def _check_status(self, lookup: Lookup) -> None:
        """Ask upstreams now and then whether they are syncing, which blocks they keep and which methods they offer."""
        now = self._clock()
        due = [
            each
            for each in self._state.upstreams
            if now - self._status_at.get(each.health.index, -math.inf) >= STATUS_S
        ]
        self._status_at |= {each.health.index: now for each in due}
        answers = await asyncio.gather(*[look_up(each, lookup, skips_errors=True) for each in due])
        for upstream, answer in zip(due, answers, strict=True):
            if answer.values is None:
                self._status_at[upstream.health.index] = now - STATUS_S + STATUS_AGAIN_S
                continue
            # A development chain that makes no blocks looks like one that is catching up.
            syncing = self._state.network.is_live and answer.values.get("syncing") == b"true"
            floor = number_of(answer.values.get("floor", b""), lookup.numbers) or 0
            upstream.health.status_reported(syncing=syncing, floor=floor, lacked=answer.lacked, now=self._clock())
        if due:
            self._state.note_bounds()

    async def _check_streams(self) -> None:
        for health, standing in (await self._streams.verdicts()).items():
            self._set_standing(health, standing)

    def _set_standing(self, health: UpstreamHealth, standing: Standing) -> None:
        self._change_standing(health, standing)
        self._polls.judge(health, self._clock())

    def _change_standing(self, health: UpstreamHealth, standing: Standing) -> bool:
        """Returns whether it has changed."""
        was = health.standing
        if not health.set_standing(standing, self._clock()):
            return False
        if was == "good" and health in self._state.group.members:
            self._state.distrust()
        if (was, standing) != ("unchecked", "good"):
            level, news = _NEWS[standing]
            log.log(level, news, extra={"network": self.network_id, "upstream": health.label})
        return True

    async def _identify_chain(self) -> None:
        """Identify the chain for the shared cache, which outlives this process."""
        cache = self._state.shared_cache
        upstream = next(filter(self._is_at_the_tip, self._state.upstreams), None)
        if cache is None or upstream is None:
            return
        lookup = self._lookups.first or self._lookups.chain
        answer = None if lookup is None else await look_up(upstream, lookup, self._identity_block(lookup))
        if lookup is not None and answer is not None and (name := lookup.identity(answer.values or {})):
            cache.identified(blake2b(name.encode(), digest_size=8).hexdigest())

    def _is_at_the_tip(self, upstream: Upstream) -> bool:
        health = upstream.health
        if health.silent or health.standing != "good" or self._clock() < health.rests_until:
            return False
        return health.head >= self._state.heads.agreed > 0
