"""Sends a share of clients' reads to a candidate as well, and compares its replies with those that the clients got.

A read is offered after its reply was delivered. It waits in a queue that is bounded in reads and bytes: when the queue is full,
or the candidate's rate or budget is used up, the read is skipped. The candidate is never chosen for calls, its replies reach no
client, and it does not change the health of any upstream. Params are not kept. Replies that are not equal, byte for byte, are
judged by `shadow_judge.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from typing import Any, Final

from proxy import telemetry
from proxy.core import jsonrpc
from proxy.core.trials import OUTCOMES, Trial, TrialOutcome, TrialRead
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.network_state import NetworkState, ReadObserver
from proxy.services.rpc.probe import Probe
from proxy.wire.http1 import ReplyHeaders
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection

# Reads that wait, and the bytes of their params and replies. A larger read is not compared.
MOST_WAITING: Final = 64
MOST_BYTES: Final = 4_194_304
LARGEST_READ: Final = 262_144
# Shares are counted in millionths, so that they add up.
WHOLE: Final = 1_000_000
# How long the candidate may take.
REPLY_S: Final = 10.0

_monotonic: Final = time.monotonic
_read_reply: Final = jsonrpc.read_numbered_reply
_NOT_JSON: Final = jsonrpc.NOT_JSON
_NO_REPLY: Final = jsonrpc.NumberedReply()


class AnsweredRead:
    """A read of a client, and the reply that it got."""

    __slots__ = ("account", "archive", "cost", "is_error", "params", "policy", "reply", "size", "took_s", "upstream")

    def __init__(
        self,
        policy: MethodPolicy,
        params: bytes,
        reply: bytes,
        upstream: Upstream,
        took_s: float,
        *,
        is_error: bool = False,
        cost: int = 0,
        archive: bool = False,
        account: str = "",
    ) -> None:
        """`account`: the one that made it."""
        self.policy = policy
        self.params = params
        self.reply = reply
        self.upstream = upstream
        self.took_s = took_s
        self.is_error = is_error
        self.cost = cost
        self.archive = archive
        self.account = account
        self.size = len(params) + len(reply)

    def __repr__(self) -> str:
        return f"<AnsweredRead {self.policy.method.name} by {self.upstream.label}>"


class TriedRead:
    """A read under way to the candidate. `trial`: the one that it belongs to, since a promotion begins another.

    Like a client's call on the short path, it is the sink of its own reply as long as that is usual. Any other reply is read by
    its `probe`, which the judge needs, too.
    """

    client: str = ""

    __slots__ = ("_began", "_number", "probe", "read", "shadow", "took_s", "trial")

    def __init__(self, shadow: Shadow, read: AnsweredRead, began: float) -> None:
        self.shadow = shadow
        self.read = read
        self.trial = shadow.trial
        self.took_s = 0.0
        self._began = began
        # Its id at the candidate.
        self._number = 0
        self.probe: Probe | None = None

    def __repr__(self) -> str:
        return f"<TriedRead {self.read!r}, {self.took_s:.3f} s>"

    def send(self) -> None:
        """Send it for a shadow that does not wait."""
        upstream, read = self.shadow.upstream, self.read
        self._number = upstream.send_call(self, read.policy.request_tail, read.params)
        if not self._number:
            self.as_probe().start(self._on_probe, REPLY_S)
        elif upstream.health.meter is not None:
            upstream.health.meter.began((read.policy.method.name, "", ""), archive=read.archive)

    def as_probe(self) -> Probe:
        """The probe that makes the call, or goes on with it."""
        read = self.read
        probe = self.probe = Probe(
            self.shadow.upstream,
            read.policy.method.name,
            read.params,
            rules=read.policy.family.error_rules,
            archive=read.archive,
            number=self._number,
        )
        return probe

    def ended(self, now: float) -> None:
        self.took_s = now - self._began

    def _on_probe(self) -> None:
        probe = self.probe
        assert probe is not None
        is_same = probe.result is not None and probe.result == self.read.reply and not self.read.is_error
        self.shadow.replied(self, is_same=is_same, limited=probe.is_limited)

    def _probe_under_way(self) -> Probe:
        probe = self.as_probe()
        probe.take_over(self._on_probe, self._began + REPLY_S)
        return probe

    # Called by the upstream connection

    def on_reply(self, connection: UpstreamConnection, headers: ReplyHeaders, body: bytes) -> None:
        if headers.status == 200 and headers.plain and body.isascii() and len(body) <= jsonrpc.READ_WHOLE:
            try:
                reply = _read_reply(body)
            except _NOT_JSON:
                reply = _NO_REPLY
            is_usual = reply.id == self._number and reply.result and not reply.error and not self.read.is_error
            if is_usual and bytes(reply.result) == self.read.reply:
                self.shadow.replied(self, is_same=True)
                return
        self._probe_under_way().on_reply(connection, headers, body)

    def on_fail(self, upstream: Upstream, reason: str, *, sent: bool) -> None:
        self._probe_under_way().on_fail(upstream, reason, sent=sent)

    def on_tick(self, connection: UpstreamConnection | None, now: float) -> None:
        if connection is not None and now > self._began + REPLY_S:
            probe = self._probe_under_way()
            connection.replace(self, probe)
            probe.on_tick(connection, now)

    def on_large(self, connection: UpstreamConnection, headers: ReplyHeaders, beginning: Piece) -> bool:
        return False

    def on_late(self, upstream: Upstream, headers: ReplyHeaders, body: bytes) -> None: ...
    def on_piece(self, connection: UpstreamConnection, piece: Piece) -> None: ...
    def on_end(self, connection: UpstreamConnection) -> None: ...


class Shadow(ReadObserver):
    """One candidate. `share`: the part of the reads that it gets. `without`: accounts whose reads it does not get."""

    def __init__(
        self, upstream: Upstream, share: float, state: NetworkState, without: Collection[str] = frozenset()
    ) -> None:
        self.upstream = upstream
        self._without = without
        self.trial = Trial(upstream.label)
        self._share = round(share * WHOLE)
        self.state = state
        # The part of a read that is due, in millionths.
        self._due = 0
        # Reads that are due and under way.
        self._wanted = 0
        # Outcomes that the metrics do not have yet. Adding to a metric takes longer than the rest of counting a read.
        self._new_outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._queue: deque[AnsweredRead] = deque()
        self._bytes = 0
        # Whether a read is under way, and the one whose reply must be judged, which wakes the judge.
        self._is_reading = False
        self._doubtful: TriedRead | None = None
        self.is_doubtful = asyncio.Event()
        self._loop = asyncio.get_running_loop()

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
        if self._wanted and account not in self._without and is_comparable(policy, params, self.state.heads.tip):
            self._wanted -= 1
            self._offer(AnsweredRead(policy, params, reply, upstream, took_s, account=account))

    def answered(self, flight: Flight, reply: bytes, *, is_error: bool = False) -> None:
        """The same for any other call."""
        if not flight.client or flight.answered_by is None or flight.answered_by is self.upstream:
            return
        if flight.client in self._without or not is_comparable(flight.policy, flight.params, self.state.heads.tip):
            return
        if not self._wanted and not self.wants_next():
            return
        self._wanted -= 1
        self._offer(
            AnsweredRead(
                flight.policy,
                flight.params,
                reply,
                flight.answered_by,
                _monotonic() - flight.last_began,
                is_error=is_error,
                cost=flight.cost,
                archive=flight.call.archive,
                account=flight.client,
            )
        )

    def _offer(self, read: AnsweredRead) -> None:
        if read.size > LARGEST_READ or len(self._queue) >= MOST_WAITING or self._bytes + read.size > MOST_BYTES:
            self.trial.skip()
            return
        self._bytes += read.size
        self._queue.append(read)
        if not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self.read_next)

    def promoted(self, share: float) -> None:
        """It gets this part of the calls from now on. Its trial starts again: each step is judged by its own reads."""
        self.upstream.health.promoted(share, _monotonic())
        self.trial = Trial(self.upstream.label, share)

    def report(self) -> dict[str, Any]:
        """What its trial has found, for other processes. The metrics are brought up to date, too."""
        for outcome, count in self._new_outcomes.items():
            telemetry.shadow_reads_total.labels(self.upstream.label, outcome).inc(count)
            self._new_outcomes[outcome] = 0
        self.trial.bounds_found(self.upstream.health.bounds.text)
        return self.trial.as_data

    def read_next(self) -> None:
        """Send the next read. Most replies are equal to ours, so they need no task."""
        while self._queue:
            read = self._queue.popleft()
            self._bytes -= read.size
            if (tried := self.begin(read)) is not None:
                tried.send()
                return
        self._is_reading = False

    def replied(self, tried: TriedRead, *, is_same: bool, limited: bool = False) -> None:
        """The candidate has replied, or failed to."""
        self.ended(tried, limited=limited)
        if is_same:
            self.count(tried, "same", ())
            self._is_reading = bool(self._queue)
            if self._is_reading:
                self._loop.call_soon(self.read_next)
        else:
            self._doubtful = tried
            self.is_doubtful.set()

    def next_doubtful(self) -> TriedRead | None:
        """A read whose replies differ, once."""
        tried, self._doubtful = self._doubtful, None
        return tried

    def begin(self, read: AnsweredRead) -> TriedRead | None:
        """None if the candidate may not get it."""
        health, name, now = self.upstream.health, read.policy.method.name, _monotonic()
        is_affordable = health.affords(name, archive=read.archive) and health.admits(name, now)
        if not health.takes_trials(now) or not is_affordable:
            self.trial.skip()
            return None
        health.begin(now)
        health.begin_method(name, now)
        return TriedRead(self, read, now)

    def ended(self, tried: TriedRead, *, limited: bool) -> None:
        """The call of a read is over, however it ended. `limited`: the candidate limits our rate."""
        now = _monotonic()
        self.upstream.health.ended()
        tried.ended(now)
        tried.trial.replied(now, limited=limited)

    def count(self, tried: TriedRead, outcome: TrialOutcome, members: tuple[str, ...]) -> None:
        read, meter = tried.read, self.upstream.health.meter
        name = read.policy.method.name
        cost = 0 if meter is None else meter.cost_of(name, archive=read.archive)
        tried.trial.read(name, TrialRead(outcome, read.took_s, tried.took_s, members, read.cost, cost, read.account))
        self._new_outcomes[outcome] += 1


def is_comparable(policy: MethodPolicy, params: bytes, tip: int) -> bool:
    """Whether two upstreams that are right reply the same to these params."""
    if not policy.is_comparable:
        return False
    if not policy.by_range:
        return True
    # A range that ends at the head has another end at each upstream.
    return policy.last_block(params, tip) == policy.last_block(params, tip + 1) <= tip
