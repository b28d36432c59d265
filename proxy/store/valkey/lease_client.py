"""Asks Valkey for leases on behalf of one worker: for its calls that wait, in advance for those to come, and to report what was
spent. Nothing waits longer than `valkey_link.LATE_S`: if Valkey does not answer by then, the host's share decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import hiredis

from proxy.core.limits import BucketRates
from proxy.store.shared_memory.lease_records import LeaseGrant
from proxy.store.shared_memory.leased_buckets import AHEAD_ROUND_TRIPS, AHEAD_S, LeasedBuckets
from proxy.store.valkey.valkey_link import LATE_S, ValkeyLink

LEASE = "penstock_lease_1"
# Calls give up waiting for a lease after this time. It counts from the arrival of the call: a busy process may need some of it
# before it charges the call for the first time, and a call that no limit refuses must not be refused for that.
LATEST_S = 0.25
# Spent tokens are reported this soon: until then Valkey holds them back from the others.
REPORT_S = 0.05
SWEEP_S = 0.025
# Calls wait this long for the reply to an ask that was sent before they came; then another one is sent for them.
SLOW_S = 0.005

# The need of a call, in seconds of refill: requests and units.
Need = tuple[float, float]


class BucketAsks:
    """Calls of this worker that wait for a lease of one bucket pair and for which Valkey was not asked yet, and how many
    asks are under way."""

    __slots__ = ("asked_at", "hint", "under_way", "waiting")

    def __init__(self) -> None:
        self.under_way = 0
        # When the last ask was sent.
        self.asked_at = 0.0
        # The largest need of a call that does not wait, but tries again by itself.
        self.hint: Need = (0.0, 0.0)
        self.waiting: list[tuple[Need, Callable[[], None]]] = []

    def __repr__(self) -> str:
        return f"<SlotAsks {len(self.waiting)} waiting, {self.under_way} under way>"

    def take(self) -> tuple[Need, list[Callable[[], None]]]:
        """The tokens to request now, and the calls to try again after the reply."""
        (requests, units), self.hint = self.hint, (0.0, 0.0)
        waiting, self.waiting = self.waiting, []
        needs = [need for need, _ in waiting]
        need = (max(requests, sum([each[0] for each in needs])), max(units, sum([each[1] for each in needs])))
        return need, [again for _, again in waiting]


class SentAsk(NamedTuple):
    """An ask under way: when it was sent, what one request and one unit cost then, and the calls that wait for the reply."""

    at: float
    costs: Need
    waiting: list[Callable[[], None]]


class LeaseClient:
    def __init__(self, link: ValkeyLink, buckets: LeasedBuckets, key_of: Callable[[int], str]) -> None:
        """`key_of`: the key in Valkey of a bucket pair."""
        self._link = link
        self._buckets = buckets
        self._key_of = key_of
        self._loop = asyncio.get_running_loop()
        # Bucket indexes that this worker has asked for and that may hold tokens.
        self._asks: dict[int, BucketAsks] = {}
        self._low: set[int] = set()
        self.asked = 0
        buckets.on_low(self._on_low)
        link.on_change.append(self._on_change)

    def __repr__(self) -> str:
        return f"<LeaseClient {len(self._asks)} bucket pairs, {self._link!r}>"

    def __len__(self) -> int:
        """The number of limits for which this worker has recently requested tokens."""
        return len(self._asks)

    # Waiting calls

    def wait(self, bucket_index: int, need: Need, again: Callable[[], None]) -> None:
        """Call `again` when the bucket pair has got a lease, or when it is certain that it gets none."""
        self._asks.setdefault(bucket_index, BucketAsks()).waiting.append((need, again))
        self._on_low(bucket_index)

    def hint(self, bucket_index: int, need: Need) -> None:
        """Ask for a call that tries again by itself."""
        asks = self._asks.setdefault(bucket_index, BucketAsks())
        asks.hint = (max(asks.hint[0], need[0]), max(asks.hint[1], need[1]))
        self._on_low(bucket_index)

    def lacking(self, rate: BucketRates, own: BucketRates, requests: int, units: int) -> BucketRates:
        """The one of two limits that a call has to wait for."""
        need = (requests * own.request_s, units * own.unit_s)
        return own if self._buckets.lease(own.bucket_index).lacks(need, time.monotonic()) else rate

    def _on_low(self, bucket_index: int) -> None:
        """Called while the pair's mutex is held."""
        if not self._low:
            self._loop.call_soon(self._renew)
        self._low.add(bucket_index)

    def _renew(self) -> None:
        low, self._low = self._low, set()
        for bucket_index in low:
            asks = self._asks.setdefault(bucket_index, BucketAsks())
            if not asks.under_way:
                self._ask(bucket_index)
            elif asks.waiting:
                self._ask_if_slow(bucket_index, asks)

    def _ask_if_slow(self, bucket_index: int, asks: BucketAsks) -> None:
        """A call that waits for the reply to another's ask, and then for its own, waits twice: that may take too long."""
        left_s = asks.asked_at + SLOW_S - time.monotonic()
        if left_s <= 0.0 or self._link.round_trip_s > SLOW_S:
            self._ask(bucket_index)
        else:
            self._loop.call_later(left_s, self._ask_again, bucket_index)

    def _ask_again(self, bucket_index: int) -> None:
        if bucket_index in self._asks and self._asks[bucket_index].waiting:
            self._on_low(bucket_index)

    def _ask(self, bucket_index: int, *, is_report: bool = False) -> None:
        asks, now = self._asks[bucket_index], time.monotonic()
        need, waiting = asks.take()
        if not self._link.is_up:
            _run(waiting)
            return
        rate, guard = self._buckets.rates[bucket_index]
        report = self._buckets.report(rate, guard, now, need, 0.0 if is_report else self._ahead_s())
        sent = SentAsk(now, (rate.request_s, rate.unit_s), waiting)
        words = (LEASE, "1", self._key_of(bucket_index), *(f"{cost:.9g}" for cost in sent.costs), *_texts(report))
        asks.under_way += 1
        asks.asked_at = now
        self.asked += 1
        self._link.send(("FCALL", *words), lambda reply: self._on_reply(bucket_index, sent, reply))

    def _ahead_s(self) -> float:
        return max(AHEAD_S, AHEAD_ROUND_TRIPS * self._link.round_trip_s)

    def _on_reply(self, bucket_index: int, sent: SentAsk, reply: Any) -> None:
        """Let the waiting calls try again, in their order. Those that still need a lease wait again."""
        asks = self._asks[bucket_index]
        asks.under_way -= 1
        if isinstance(reply, hiredis.ReplyError):
            self._link.reload(str(reply))
        elif reply is not None:
            self._add(bucket_index, sent, reply)
        _run(sent.waiting)
        self._ask_again(bucket_index)

    def _add(self, bucket_index: int, sent: SentAsk, reply: list[int]) -> None:
        """Granted tokens keep their value of the time of the request. The limit may have changed (`LeasedRate.slow_to`)."""
        requests, units, life_us, wait_us, granted, epoch, there_us = reply
        rate, guard = self._buckets.rates[bucket_index]
        given = LeaseGrant(
            requests * sent.costs[0],
            units * sent.costs[1],
            sent.at + life_us / 1e6,
            wait_us / 1e6,
            epoch,
            requests,
            granted / 1000,
            there_us / 1e6,
        )
        self._buckets.grant(rate, guard, time.monotonic(), given, self._ahead_s() / 2)

    def may_wait(self, began: float) -> bool:
        """Whether a call that began then can wait for a reply, even for one that comes too late."""
        return time.monotonic() - began < LATEST_S - LATE_S

    # Loops

    def _on_change(self) -> None:
        self._buckets.away = not self._link.is_up

    async def run(self) -> None:
        """A supervised loop: report spent tokens."""
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._link.is_up:
                self._report(time.monotonic())

    def _report(self, now: float) -> None:
        for bucket_index, asks in [*self._asks.items()]:
            if asks.under_way or asks.waiting:
                continue
            lease = self._buckets.lease(bucket_index)
            if not lease.is_leased(now) or lease.is_empty():
                del self._asks[bucket_index]
            elif now - lease.reported_at > (REPORT_S if lease.has_spent() else lease.return_s()):
                self._ask(bucket_index, is_report=True)


def _run(waiting: list[Callable[[], None]]) -> None:
    for again in waiting:
        again()


def _texts(numbers: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f"{number:.12g}" for number in numbers)
