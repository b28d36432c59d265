"""Charges work that makes further upstream calls, call by call.

Admission charges a request once, at the price of one call. Work that turns out to need more calls, such as logs over many
blocks or a back-test, opens a meter on the key and pays for each further call at its list price before it is made. Calls draw
on what the request has paid already, then on the account's units. If the bucket is empty, the work waits for the refill, so
that it goes on at the account's own rate; it ends with an error if it cannot be paid for in time. Units of calls that were
made are not refunded.

    meter = meters.open(key, prepaid=price, within_s=20.0)
    await meter.pay(units)            # before each call; raises RateLimited if the account has no more
    meter.unused(units)               # the call was answered from the cache, or was not made
    meter.owe(units)                  # the reply was large: the next payment includes what reading it costs
    cost = meter.settle(least=price)  # refunds what is left and returns what the request costs

Payments of one account wait in line, and the pieces of its calls that are under way are bounded over all of its calls, so that
one account takes a fair share of the upstreams' connections.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from weakref import WeakValueDictionary

from proxy import telemetry
from proxy.core.access import Key
from proxy.errors import Fault, Forbidden, RateLimited
from proxy.services.accounts.admission import Admission

# Pieces of one account's calls that are under way in a worker.
MOST_PIECES = 16
# How long a request waits for the units of all its calls together, unless it has a deadline of its own.
LONGEST_WAIT_S = 20.0
# Refills are awaited for at least this long: shorter pauses would only cost time on the loop.
LEAST_PAUSE_S = 0.01


class _AccountTurns:
    """The queue of an account's payments, the slots for its pieces, and what requests owed that have ended."""

    __slots__ = ("__weakref__", "_debtors", "_owed", "line", "pieces")

    def __init__(self, debtors: set[_AccountTurns]) -> None:
        """`debtors`: keeps accounts that owe something, whether or not they have requests."""
        self._debtors = debtors
        self._owed = 0
        self.line = asyncio.Lock()
        self.pieces = asyncio.Semaphore(MOST_PIECES)

    def owe(self, units: int) -> None:
        """The next request that makes calls pays for this first."""
        self._owed += units
        self._debtors.add(self)

    def take_debt(self) -> int:
        """The account's debt, which the caller pays."""
        owed, self._owed = self._owed, 0
        self._debtors.discard(self)
        return owed


class Meters:
    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._turns: WeakValueDictionary[str, _AccountTurns] = WeakValueDictionary()
        self._debtors: set[_AccountTurns] = set()

    def __repr__(self) -> str:
        return f"<Meters of {len(self._turns)} accounts>"

    def open(self, key: Key, *, prepaid: int = 0, within_s: float = LONGEST_WAIT_S) -> Meter:
        """A meter for one request, which has paid `prepaid` units that its calls may use."""
        turns = self._turns.get(key.account.id)
        if turns is None:
            turns = self._turns[key.account.id] = _AccountTurns(self._debtors)
        return Meter(self._admission, key, turns, prepaid=prepaid, deadline=time.monotonic() + within_s)


class Meter:
    """The units that one request has paid, and those that its calls have used."""

    __slots__ = (
        "_admission",
        "_deadline",
        "_is_closed",
        "_owed",
        "_turns",
        "_waiting",
        "_waits_since",
        "cost",
        "key",
        "least",
        "paid",
        "pays_for_hits",
        "used",
        "waited_s",
    )

    def __init__(self, admission: Admission, key: Key, turns: _AccountTurns, *, prepaid: int, deadline: float) -> None:
        self._admission = admission
        self._turns = turns
        self._deadline = deadline
        self._is_closed = False
        self._owed = 0
        self.key = key
        self.paid = prepaid
        self.used = 0
        # The least price of the request, for its size.
        self.least = 0
        # The cost of its calls at their upstreams' providers, in billionths of a dollar.
        self.cost = 0
        self.pays_for_hits = False
        # For how long the request has waited for units in all, how many of its payments wait now, and since when.
        self.waited_s = 0.0
        self._waiting = 0
        self._waits_since = 0.0

    def __repr__(self) -> str:
        return f"<Meter {self.key.id}: {self.used} of {self.paid} units used>"

    @property
    def pieces(self) -> asyncio.Semaphore:
        """The slots for the account's pieces: `async with meter.pieces`."""
        return self._turns.pieces

    @property
    def portion(self) -> int:
        """The most units to pay at once. The rest of the account's units stays for its other requests."""
        return max(1, (self.key.own_rate or self.key.rate).units_per_second // 4)

    @property
    def due(self) -> int:
        """The price of the request so far, paid or not."""
        return max(self.least, self.used) + self._owed

    def affords(self, price: int) -> int:
        """How many calls at this price the account can pay for until the deadline, if it makes no others."""
        rate = self.key.own_rate or self.key.rate
        left_s = 1.0 + max(0.0, self._deadline - time.monotonic())  # The bucket holds the units of one second.
        return int(rate.units_per_second * left_s) // max(price, 1)

    async def pay(self, units: int) -> None:
        """Pay for a call that is about to be made, after what is owed. Raises RateLimited if the account has no units for it in
        time."""
        self._owed += self._turns.take_debt()
        while self._owed > 0:
            part = min(self._owed, self.portion)
            self._owed -= part
            try:
                await self._pay(part)
            except BaseException:
                self._owed += part
                raise
        await self._pay(units)

    async def pay_beyond(self, price: int, units: int) -> None:
        """Pay for work that the price of the request does not cover: what was prepaid for the rest of it stays spent."""
        self.used = max(self.used, min(price, self.paid))
        await self.pay(units)

    async def _pay(self, units: int) -> None:
        if not self._turns.line.locked() and self.pay_now(units) is None:
            return
        began = self._begin_wait()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())), self._turns.line:
                while (refusal := self.pay_now(units)) is not None:
                    if not isinstance(refusal, RateLimited) or time.monotonic() + refusal.wait_s > self._deadline:
                        raise refusal
                    await asyncio.sleep(max(refusal.wait_s, LEAST_PAUSE_S))
        except TimeoutError:
            message = f"the account's compute units ran out: the request has used {self.used} of them and needs more"
            raise RateLimited(message, retry_after_s=1) from None
        finally:
            telemetry.rate_wait_seconds.labels("work").observe(self._end_wait() - began)

    def owe(self, units: int) -> None:
        """Count work that is under way already. It is paid for before the next call, so that nothing is held meanwhile."""
        self._owed += units

    async def pay_for_size(self, units: int) -> None:
        """Pay for a part of the request's body. Calls of the request draw on it."""
        self.least += units
        await self.pay(self.least)
        self.used -= self.least

    def _begin_wait(self) -> float:
        now = time.monotonic()
        if not self._waiting:
            self._waits_since = now
        self._waiting += 1
        return now

    def _end_wait(self) -> float:
        """Payments may wait at the same time: that time counts once."""
        now = time.monotonic()
        self._waiting -= 1
        if not self._waiting:
            self.waited_s += now - self._waits_since
        return now

    def pay_now(self, units: int) -> Fault | None:
        """Like `pay`, without waiting: returns the refusal."""
        missing = 0 if self._is_closed else self.used + units - self.paid
        if missing > 0:
            if not self.key.alive:
                return Forbidden("this API key was changed or revoked", reason="disabled")
            refusal = self._admission.charge(self.key, 0, missing, time.monotonic())
            if refusal is not None:
                return refusal
            self.paid += missing
        self.used += units
        return None

    def add_cost(self, nanos: int) -> None:
        """Count what a call costs at its upstream's provider."""
        self.cost += nanos

    def unused(self, units: int) -> None:
        """A call that was paid for needed no upstream call: its units pay for the next one."""
        self.used -= units

    def pay_for_hits(self) -> None:
        """From now on the request also pays for calls that the cache answers: it may read thousands, and each takes our time
        wherever it comes from."""
        self.pays_for_hits = True

    def answered_here(self, units: int) -> None:
        """A call that was paid for was answered from the cache, or by joining an equal call under way."""
        if not self.pays_for_hits:
            self.unused(units)

    def settle(self, least: int) -> int:
        """The request is over. Refund what its calls have not used, and return its cost: `least`, or its size, or more. What it
        owes and cannot pay now is left to the account's next request. Work that outlives the request, because others wait for
        it too, is not charged to it any more."""
        if not self._is_closed:
            if self._owed > 0 and self.pay_now(self._owed) is not None:
                self._turns.owe(self._owed)
            cost = max(least, self.least, self.used)
            if cost < self.paid:
                self._admission.refund(self.key, 0, self.paid - cost)
            self._is_closed, self.paid = True, cost
        return self.paid


# The meter of the request that the current task serves; None in background work, which no account pays for.
meter_of_task: ContextVar[Meter | None] = ContextVar("meter_of_task", default=None)
