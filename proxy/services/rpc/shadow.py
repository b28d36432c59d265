"""Sends a share of clients' reads to a candidate as well, and compares its replies with those that the clients got.

A read is offered after its reply was delivered. It waits in a queue that is bounded in reads and bytes: when the queue is full,
or the candidate's rate or budget is used up, the read is skipped. The candidate is never chosen for calls, its replies reach no
client, and it does not change the health of any upstream. Params are not kept.

Reads at the latest block may be answered at different blocks. If such replies differ, both upstreams are asked again at one
block that both have.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from proxy import telemetry
from proxy.chains.family import BlockRef
from proxy.core.jsonrpc import NULL
from proxy.core.trials import OUTCOMES, Trial, TrialOutcome, TrialRead, differing_members, is_same_error
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.probe import Probe, look_up
from proxy.services.rpc.reply_checks import SMALL, off_loop
from proxy.wire.upstream import Upstream

# Reads that wait, and the bytes of their params and replies. A larger read is not compared.
MOST_WAITING: Final = 64
MOST_BYTES: Final = 4_194_304
LARGEST_READ: Final = 262_144
# A reply of the candidate that is longer than twice ours by this much is another one. It is not decoded: that may take seconds.
LARGER: Final = 65_536
# Shares are counted in millionths, so that they add up.
WHOLE: Final = 1_000_000
# How long the candidate may take.
REPLY_S: Final = 10.0
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError)


@dataclass(frozen=True, slots=True)
class AnsweredRead:
    """A read of a client, and the reply that it got."""

    policy: MethodPolicy
    params: bytes
    reply: bytes
    is_error: bool
    upstream: Upstream
    took_s: float
    cost: int
    archive: bool
    # The account that made it.
    account: str = ""

    @property
    def size(self) -> int:
        return len(self.params) + len(self.reply)


class Shadow:
    """One candidate. `share`: the part of the reads that it gets. `without`: accounts whose reads it does not get."""

    def __init__(
        self, upstream: Upstream, share: float, state: NetworkState, without: Collection[str] = frozenset()
    ) -> None:
        self.upstream = upstream
        self._without = without
        self.trial = Trial(upstream.label)
        self._share = round(share * WHOLE)
        self._state = state
        # The part of a read that is due, in millionths.
        self._due = 0
        # Reads that are due and under way.
        self._wanted = 0
        # Finding a metric by its labels takes longer than counting.
        self._counted = {each: telemetry.shadow_reads_total.labels(upstream.label, each) for each in OUTCOMES}
        self._queue: deque[AnsweredRead] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Shadow {self.upstream.label} of {self._share / WHOLE:.1%}, {len(self._queue)} waiting>"

    def wants_next(self) -> bool:
        """A read of a client begins. Returns whether it is due here too, once it is answered."""
        self._due += self._share
        if self._due < WHOLE:
            return False
        self._due -= WHOLE
        if self._wanted >= MOST_WAITING:
            self.trial.skip()
            return False
        self._wanted += 1
        return True

    def short_answered(
        self, account: str, policy: MethodPolicy, params: bytes, reply: bytes, upstream: Upstream, took_s: float
    ) -> None:
        """A client's call on the short path was answered, and its reply is on its way."""
        if self._wanted and account not in self._without and is_comparable(policy, params, self._state.heads.tip):
            self._wanted -= 1
            self._offer(
                AnsweredRead(
                    policy,
                    params,
                    reply,
                    is_error=False,
                    upstream=upstream,
                    took_s=took_s,
                    cost=0,
                    archive=False,
                    account=account,
                )
            )

    def answered(self, flight: Flight, reply: bytes, *, is_error: bool = False) -> None:
        """The same for any other call."""
        if not flight.client or flight.answered_by is None or flight.answered_by is self.upstream:
            return
        if flight.client in self._without or not is_comparable(flight.policy, flight.params, self._state.heads.tip):
            return
        if not self._wanted and not self.wants_next():
            return
        self._wanted -= 1
        self._offer(
            AnsweredRead(
                flight.policy,
                flight.params,
                reply,
                is_error,
                flight.answered_by,
                time.monotonic() - flight.last_began,
                flight.cost,
                flight.call.archive,
                flight.client,
            )
        )

    def _offer(self, read: AnsweredRead) -> None:
        if read.size > LARGEST_READ or len(self._queue) >= MOST_WAITING or self._bytes + read.size > MOST_BYTES:
            self.trial.skip()
            return
        self._bytes += read.size
        self._queue.append(read)
        self._wake.set()

    def promoted(self, share: float) -> None:
        """It gets this part of the calls from now on. Its trial starts again: each step is judged by its own reads."""
        self.upstream.health.promoted(share, time.monotonic())
        self.trial = Trial(self.upstream.label, share)

    async def run(self) -> None:
        """A supervised loop."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                read = self._queue.popleft()
                self._bytes -= read.size
                await self.compare(read)

    async def compare(self, read: AnsweredRead) -> None:
        """Send the read to the candidate, and count how its reply compares."""
        # A promotion meanwhile begins another trial.
        health, trial, now = self.upstream.health, self.trial, time.monotonic()
        name = read.policy.method.name
        is_affordable = health.affords(name, archive=read.archive) and health.admits(name, now)
        if not health.takes_trials(now) or not is_affordable:
            trial.skip()
            return
        health.begin(now)
        health.begin_method(name, now)
        try:
            probe = Probe(self.upstream, name, read.params)
            result = await probe.send(REPLY_S)
        finally:
            health.ended()
        their_s = time.monotonic() - now
        trial.replied(now + their_s, limited=probe.is_limited)
        trial.bounds_found(health.bounds.text)
        outcome, members = await self._outcome(read, result, probe)
        cost = 0 if health.meter is None else health.meter.cost_of(name, archive=read.archive)
        trial.read(name, TrialRead(outcome, read.took_s, their_s, members, read.cost, cost, read.account))
        self._counted[outcome].inc()

    async def _outcome(
        self, read: AnsweredRead, result: bytes | None, probe: Probe
    ) -> tuple[TrialOutcome, tuple[str, ...]]:
        if result is None:
            if read.is_error and probe.error_reply and is_same_error(read.reply, probe.error_reply):
                return "same", ()
            if probe.lacks_method:
                return "missing", ()
            if probe.error not in ("revert", "missing_data", "behind"):
                return "error", ()
            members: tuple[str, ...] = (f"error: {probe.error}",)
        elif read.is_error:
            members = ("error",)
        else:
            members = await differences(read.policy, read.reply, result)
            if not members:
                return "same", ()
        return await self._second_look(read, members)

    async def _second_look(self, read: AnsweredRead, members: tuple[str, ...]) -> tuple[TrialOutcome, tuple[str, ...]]:
        """The replies differ. Find out whether the candidate, or one of the two replies, is of another block."""
        number = self._state.head_reader.lookups.number
        head = number.number((await look_up(self.upstream, number)).values or {})
        if head is None:
            return "error", ()
        policy = read.policy
        ref = BlockRef("none") if policy.is_plain else policy.family.block_ref(policy.method, read.params)
        if ref.moves:
            return await self._at_one_block(read, head, members)
        named = None if read.is_error else self._state.head_reader.newest_block(read.reply)
        if max(ref.number, -1 if named is None else named) > head:
            return "behind", ()
        return "different", members

    async def _at_one_block(
        self, read: AnsweredRead, head: int, members: tuple[str, ...]
    ) -> tuple[TrialOutcome, tuple[str, ...]]:
        """Ask both at a block that both have."""
        policy, at_block = read.policy, read.policy.family.at_block
        is_behind = head < self._state.heads.tip
        common = min(head, read.upstream.health.head)
        if (
            at_block is None
            or common <= 0
            or policy.family.block_ref(policy.method, read.params).tag != policy.family.latest
        ):
            return ("behind", ()) if is_behind else ("different", members)
        params = at_block(policy.method, read.params, common)
        probes = [Probe(each, policy.method.name, params) for each in (read.upstream, self.upstream)]
        ours, theirs = [await probe.send(REPLY_S) for probe in probes]
        if ours is None or theirs is None:
            errors = [probe.error_reply for probe in probes]
            if ours is theirs and all(errors) and is_same_error(*errors):
                return ("behind" if is_behind else "same"), ()
            is_clear = all(probe.is_answered for probe in probes)
            return ("different", members) if is_clear else ("error", ())
        found = await differences(policy, ours, theirs)
        return ("different", found) if found else (("behind" if is_behind else "same"), ())


def is_comparable(policy: MethodPolicy, params: bytes, tip: int) -> bool:
    """Whether two upstreams that are right reply the same to these params."""
    if not policy.is_comparable:
        return False
    if not policy.by_range:
        return True
    # A range that ends at the head has another end at each upstream.
    return policy.last_block(params, tip) == policy.last_block(params, tip + 1) <= tip


async def differences(policy: MethodPolicy, ours: bytes, theirs: bytes) -> tuple[str, ...]:
    if ours == theirs:
        return ()
    if len(theirs) > 2 * len(ours) + LARGER:
        return (".",)
    if len(ours) + len(theirs) <= SMALL:
        return _differences(policy, ours, theirs)
    return await off_loop(_differences, policy, ours, theirs)


def _differences(policy: MethodPolicy, ours: bytes, theirs: bytes) -> tuple[str, ...]:
    try:
        return differing_members(ours or NULL, theirs, policy.volatile)
    except _UNREADABLE:
        return (".",)
