"""Admits a batch: its items are read, checked, priced, charged and sent.

Most batches are small, and are admitted at once. Others are admitted step by step, in the turns of their account:

* A large batch, or one with mistakes in it, is *read* a few items at a time. Nothing is charged or sent before all items are
  read, because a body that is not a batch is refused as a whole. It is read when its account has room for its items; until then
  it *waits for room*, for as long as items wait for their rate.
* The batch then *starts* when the buckets hold enough for its first items together, and so much that all items can be charged
  in time. A batch that is under way takes each token as it is refilled, so the next one starts when this one is done. This
  way batches of an account follow each other, in all its workers, instead of sharing a rate that is too low for both. One
  that cannot start in time, or only too late for some of its items, is *refused whole*: it has cost nothing, and libraries
  such as ethers repeat a request that got a 429, but no single call of a batch.
* Its items are *charged* in order, a few in each turn, and sent on without waiting for the others. When the buckets are empty,
  the others *wait for the rate*, up to a bound; then they are *refused*, each with the time to retry.

Waiting costs the client nothing, so few batches of an account wait at a time, and the memory of batches that are read or wait
is that of their account (`memory_budget.py`). If the worker has no room for a batch, the account that holds most makes room:
its newest batch is refused. So an account with few batches never loses items because of others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Final, Literal

from proxy import telemetry
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.batch_reader import BatchReader
from proxy.core.directives import Directives
from proxy.core.jsonrpc import MalformedCall, RawCall
from proxy.core.limits import TOLERANCE_S
from proxy.core.pricing import UNITS_OF_AN_ERROR, size_units
from proxy.errors import Fault, Forbidden, LeasePending, RateLimited
from proxy.memory_budget import BudgetLine
from proxy.services.accounts.admission import Admission
from proxy.services.rpc.batches import BatchItem, CallBatch
from proxy.services.rpc.call_checks import SubscriptionCalls, check_call
from proxy.services.rpc.forwarder import Forwarder
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.turn_queue import TurnQueue

# Items that are admitted in one step, and items that are refused. Between two steps other clients have their turns.
ITEMS_PER_STEP = 25
REFUSED_PER_STEP = 100
# A full bucket, and how full it has to be for a batch to start that does not need more: so full that no batch can be under way,
# and that two cannot start at once. Both in seconds of refill.
FULL_S: Final = 1.0
LEAST_TO_START_S: Final = 0.6
# Refills are awaited for at least this long, so that several items are sent on together.
LEAST_PAUSE_S = 0.05

# Batches of one account that wait in a worker.
MOST_OF_ACCOUNT = 8
# The memory of an item besides its part of the body, and the shortest part that an item has.
ITEM_BYTES: Final = 640
LEAST_IN_BODY: Final = 40
TOO_LATE = "the rate limit leaves no time for all calls of this batch: send it again"
REVOKED = "this API key was changed or revoked"
NO_ROOM = "the worker has no room for more waiting batches of this account: make fewer at a time"

# Refuses a batch whole. The ids are those of its calls; there are none if it could not be read.
BatchRefusal = Callable[[Fault | MalformedCall, Sequence[bytes]], None]
# A call that may be made, with its price; and one that is answered with an error for its own mistake.
PricedItem = tuple[BatchItem, MethodPolicy, RawCall, int]
MistakenItem = tuple[BatchItem, bytes]
AdmissionStep = Literal["wait_for_room", "read", "wait_to_start", "charge", "wait_for_rate", "refuse", "over"]


class WaitingBatches:
    """The batches that are read or wait, by account."""

    def __init__(self, memory: BudgetLine) -> None:
        self.memory = memory
        self._batches: dict[str, list[BatchAdmission]] = {}
        self._bytes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<WaitingBatches {len(self)} of {len(self._batches)} accounts>"

    def __len__(self) -> int:
        return sum([len(batches) for batches in self._batches.values()])

    def enter(self, batch: BatchAdmission, account: str, size: int) -> bool:
        """Take room for the batch. If there is none, accounts that hold more than this one make it."""
        while not self.memory.take(account, size):
            greediest = self._greediest()
            if self._bytes.get(greediest, 0) <= self._bytes.get(account, 0) + size:
                return False
            self._batches[greediest][-1].give_up()
        self._batches.setdefault(account, []).append(batch)
        self._bytes[account] = self._bytes.get(account, 0) + size
        return True

    def _greediest(self) -> str:
        """The account that holds most."""
        greediest, most = "", 0
        for account, held in self._bytes.items():
            if held > most:
                greediest, most = account, held
        return greediest

    def may_wait(self, account: str) -> bool:
        """Whether one more batch of the account may wait for the rate."""
        return len([each for each in self._batches[account] if each.has_waited]) < MOST_OF_ACCOUNT

    def leave(self, batch: BatchAdmission, account: str, size: int) -> None:
        batches = self._batches[account]
        batches.remove(batch)
        self._bytes[account] -= size
        if not batches:
            del self._batches[account], self._bytes[account]
        self.memory.give_back(account, size)


@dataclass(frozen=True, slots=True)
class BatchServices:
    """The parts of the worker that batches use. `most_items`: the largest batch. `wait_s`: how long items wait for their rate,
    and batches for room."""

    admission: Admission
    forwarder: Forwarder
    turns: TurnQueue
    waiting: WaitingBatches
    most_items: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """How the calls of a batch are made: on which network, with which key and directives, and who subscribes."""

    route: Route
    key: Key
    directives: Directives | None
    subscriber: SubscriptionCalls | None


class BatchAdmission:
    """The admission of one batch. The steps are those of the module's description."""

    __slots__ = (
        "_accepted",
        "_account",
        "_batch",
        "_has_room",
        "_mistaken",
        "_paused_at",
        "_prepaid",
        "_reader",
        "_refusal",
        "_refuse_whole",
        "_services",
        "_size",
        "_step",
        "_terms",
        "_timer",
        "_units",
        "_waited_s",
        "has_waited",
    )

    def __init__(
        self, services: BatchServices, batch: CallBatch, terms: BatchTerms, size: int, refuse: BatchRefusal
    ) -> None:
        """`size`: the bytes of the body. `refuse` is called, now or later, if the batch is refused whole."""
        self._services = services
        self._batch = batch
        self._terms = terms
        self._refuse_whole = refuse
        self._account = terms.key.account.id
        # The memory of the batch, whether it is taken, and whether the batch counts as one of the account's that wait.
        self._size = size
        self._has_room = False
        self.has_waited = False
        self._step: AdmissionStep = "read"
        self._reader: BatchReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        # The items that may run, those with a mistake, and the price of all.
        self._accepted: deque[PricedItem] = deque()
        self._mistaken: deque[MistakenItem] = deque()
        self._units = 0
        # How many of the next items are charged already: they were when the batch started.
        self._prepaid = 0
        # Why the items that are left are refused.
        self._refusal: Fault | None = None
        # Since when the items wait for the rate, or 0, and for how long they did before.
        self._paused_at = 0.0
        self._waited_s = 0.0

    def __repr__(self) -> str:
        return f"<BatchAdmission {self._step}, {self._left} items left of {self._batch!r}>"

    @property
    def _left(self) -> int:
        return len(self._accepted) + len(self._mistaken)

    # Called by the service and by the batch

    def admit(self, calls: Sequence[RawCall], now: float) -> None:
        """Admit a small batch, at once or item by item."""
        self._add(calls)
        if self._services.admission.charge(self._terms.key, len(calls), self._units, now) is not None:
            self._size += len(calls) * ITEM_BYTES
            self._admit_by_item()
            return
        batch = self._batch
        batch.on_charged(self._units)
        for item, error in self._mistaken:
            item.decline(error)
        batch.expect(len(self._accepted))
        self._send(self._accepted, now)

    def read(self, body: bytes) -> None:
        """Read a batch in turn with other clients, then admit it item by item."""
        services = self._services
        self._reader = BatchReader(body, services.most_items, self._terms.route.dialect)
        self._size += min(services.most_items, self._size // LEAST_IN_BODY + 1) * ITEM_BYTES
        self._batch.begin_admission(self)
        if not self._begin_reading():
            self._step = "wait_for_room"
            services.waiting.memory.budget.wait(self._account, self._begin_later)
            self._timer = asyncio.get_running_loop().call_later(services.wait_s, self.give_up)

    def leave(self) -> None:
        """The client is gone."""
        self._end()

    def give_up(self) -> None:
        """There was no room in time, or another account needs it: refuse the batch, or the items that are left of it."""
        refusal = RateLimited(NO_ROOM, retry_after_s=1)
        match self._step:
            case "wait_for_room" | "read":
                self._end()
                self._refuse_whole(refusal, ())
            case "wait_to_start":
                self._refuse_all(refusal)
            case "wait_for_rate":
                self._stop_timer()
                self._end_pause(time.monotonic())
                self._refuse_left(refusal)
            case "charge":  # Its turn will come.
                self._step, self._refusal = "refuse", refusal
                self._give_room()
            case _:
                self._give_room()

    # Room

    def _begin_reading(self) -> bool:
        """Read the batch, if there is room for it."""
        if not self._takes_room():
            return False
        self._stop_timer()
        self._next("read")
        return True

    def _begin_later(self) -> bool:
        """Called while others give back memory. Only free room is taken: no account is made to give up its room meanwhile."""
        return self._services.waiting.memory.has_room(self._account, self._size) and self._begin_reading()

    def _takes_room(self) -> bool:
        self._has_room = self._has_room or self._services.waiting.enter(self, self._account, self._size)
        return self._has_room

    def _give_room(self) -> None:
        if self._has_room:
            self._has_room = False
            self._services.waiting.leave(self, self._account, self._size)

    def _may_wait(self, until: float) -> bool:
        if until > self._batch.began + self._services.wait_s:
            return False
        self.has_waited = self.has_waited or (self._takes_room() and self._services.waiting.may_wait(self._account))
        return self.has_waited

    # Steps

    def _next(self, step: AdmissionStep) -> None:
        """Take this step in the account's next turn."""
        self._step = step
        self._services.turns.add(self._account, self._go_on)

    def _go_on(self) -> bool:
        match self._step:
            case "read":
                self._read()
            case "charge":
                self._charge()
            case "refuse":
                self._refuse_some()
            case _:
                pass  # The client left, or the batch was given up.
        return False

    def _end(self) -> None:
        """Nothing is left to do."""
        self._step = "over"
        self._stop_timer()
        self._refund_prepaid()
        self._services.waiting.memory.budget.forget(self._account, self._begin_later)
        self._give_room()
        self._batch.end_admission()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self) -> None:
        assert self._reader is not None
        try:
            self._add(self._reader.read(ITEMS_PER_STEP))
        except MalformedCall as exc:
            self._end()
            self._refuse_whole(exc, ())
            return
        if self._reader.is_done:
            self._admit_by_item()
        else:
            self._next("read")

    def _add(self, calls: Sequence[RawCall | MalformedCall]) -> None:
        """Check and price these calls. One that the key may not make is answered at once, and free."""
        route, key, directives = self._terms.route, self._terms.key, self._terms.directives
        for call in calls:
            if isinstance(call, MalformedCall):
                item = self._batch.add(call.id)
                item.on_checked(route.unknown)
                self._add_mistaken(item, jsonrpc.error(call.code, call.message))
                continue
            item = self._batch.add(call[2], call[1] if key.records_params else b"")
            policy = check_call(item, route, key, call, self._terms.subscriber)
            if isinstance(policy, MethodPolicy):
                price = route.state.price_of_all(policy, call[1], directives) + size_units(len(call[1]))
                self._accepted.append((item, policy, call, price))
                self._units += price
            elif isinstance(policy, Fault):
                item.decline(policy)
            else:
                self._add_mistaken(item, policy)

    def _add_mistaken(self, item: BatchItem, error: bytes) -> None:
        self._mistaken.append((item, error))
        self._units += UNITS_OF_AN_ERROR

    def _admit_by_item(self) -> None:
        batch, services = self._batch, self._services
        # A rate admits some items, sooner or later. An exhausted daily quota admits none, so it refuses the whole batch.
        exhausted = services.admission.charge(self._terms.key, 0, 0, batch.began)
        if isinstance(exhausted, RateLimited) and exhausted.wait_s > services.wait_s:
            self._refuse_all(exhausted)
            return
        batch.begin_admission(self)
        self._start()

    def _start(self) -> None:
        """Start, wait until the batch can start, or refuse it whole."""
        now = time.monotonic()
        self._end_pause(now)
        refusal = self._charge_first(now)
        if refusal is None:
            self._batch.expect(self._left)
            self._charge()
        elif isinstance(refusal, RateLimited) and self._may_wait(now + refusal.wait_s):
            self._step = "wait_to_start"
            self._timer = asyncio.get_running_loop().call_later(_pause_s(refusal), self._start)
            self._paused_at = 0.0 if isinstance(refusal, LeasePending) else now
        else:
            self._refuse_all(refusal)

    def _charge_first(self, now: float) -> Fault | None:
        """Charge so many items together that the others can be charged in time, or return why the batch does not start."""
        key, admission, wait_s = self._terms.key, self._services.admission, self._services.wait_s
        if not key.alive:
            return Forbidden(REVOKED, reason="disabled")
        total_s = admission.refill_s(key, self._left, self._units)
        # What the buckets have to hold now; and then, if the batch is sent again.
        wanted_s = total_s - (self._batch.began + wait_s - now)
        wanted_if_repeated_s = total_s - wait_s
        is_late = False
        if wanted_if_repeated_s > FULL_S:  # Some of its items are refused in any case.
            wanted_s = LEAST_TO_START_S
        elif wanted_s > FULL_S:
            wanted_s, is_late = wanted_if_repeated_s, True
        count, units = self._first_items(max(wanted_s, LEAST_TO_START_S), total_s)
        refusal = admission.charge(key, count, units, now)
        if isinstance(refusal, RateLimited):
            return refusal
        if refusal is None and is_late:
            admission.refund(key, count, units)
            return RateLimited(TOO_LATE, retry_after_s=1, wait_s=wait_s, reason="rate")
        self._prepaid = count if refusal is None else 0
        return None

    def _first_items(self, wanted_s: float, total_s: float) -> tuple[int, int]:
        """How many items are charged together to take this much from the buckets, and their price."""
        if total_s <= wanted_s:
            return self._left, self._units
        key, refill_s = self._terms.key, self._services.admission.refill_s
        count = units = 0
        for price in self._prices():
            cost_s = refill_s(key, count + 1, units + price)
            if count and cost_s > FULL_S + TOLERANCE_S:
                break
            count += 1
            units += price
            if cost_s >= wanted_s - TOLERANCE_S:
                break
        return count, units

    def _prices(self) -> Iterator[int]:
        return chain((item[3] for item in self._accepted), repeat(UNITS_OF_AN_ERROR, len(self._mistaken)))

    def _refund_prepaid(self) -> None:
        count, self._prepaid = self._prepaid, 0
        if count:
            self._services.admission.refund(self._terms.key, count, sum(islice(self._prices(), count)))

    def _refuse_all(self, refusal: Fault) -> None:
        """Refuse the batch whole: no call of it was made."""
        self._end()
        if self._waited_s:
            telemetry.rate_wait_seconds.labels("batch").observe(self._waited_s)
        self._refuse_whole(refusal, [item.id or b"" for item in self._batch.items])

    def _wait_for_rate(self, pause_s: float, since: float) -> None:
        """`since`: the time, if the client's own rate is the cause."""
        self._step = "wait_for_rate"
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._charge)
        self._paused_at = since

    def _charge(self) -> None:
        """Admit as many items as the buckets allow, and return later for the rest."""
        self._step = "charge"
        self._timer = None
        now = time.monotonic()
        self._end_pause(now)
        admitted: list[PricedItem] = []
        starts = self._prepaid > 0
        refusal = self._take(admitted, now)
        for each in admitted:
            self._count_wait(each[0])
        if admitted:
            self._send(admitted, now)
        if starts and not self._prepaid and self._left and self._may_wait(now + LEAST_PAUSE_S):
            self._wait_for_rate(LEAST_PAUSE_S, now)
        elif isinstance(refusal, RateLimited) and self._may_wait(now + refusal.wait_s):
            self._wait_for_rate(_pause_s(refusal), 0.0 if isinstance(refusal, LeasePending) else now)
        elif refusal is not None:
            self._refuse_left(refusal)
        elif self._left:
            if not self._accepted:
                self._give_room()
            self._next("charge")
        else:
            self._end()

    def _take(self, admitted: list[PricedItem], now: float) -> Fault | None:
        """Charge the next items. Returns the refusal that applies to the first one left."""
        key, admission = self._terms.key, self._services.admission
        if not key.alive:
            return Forbidden(REVOKED, reason="disabled")
        # Calls that come at the same time as the batch may have what it does not need to start.
        for _ in range(min(ITEMS_PER_STEP, self._prepaid or self._left)):
            units = self._accepted[0][3] if self._accepted else UNITS_OF_AN_ERROR
            refusal = None
            if self._prepaid:
                self._prepaid -= 1
            elif isinstance(refusal := admission.charge(key, 1, units, now), RateLimited):
                return refusal
            if not self._accepted:
                item, error = self._mistaken.popleft()
                item.decline(refusal or error)
            elif refusal is None:
                admitted.append(self._accepted.popleft())
            else:  # It costs more than the buckets ever hold.
                self._accepted.popleft()[0].decline(refusal)
            self._batch.on_charged(0 if refusal else units)
        return None

    def _send(self, items: Sequence[PricedItem], now: float) -> None:
        terms = self._terms
        forwarded = []
        for item, policy, call, price in items:
            item.on_admitted(price)
            if terms.subscriber is not None and policy.method.kind == "subscription":
                terms.subscriber.subscribe(item, policy, call[1])
            else:
                forwarded.append((item, policy, call[1]))
        self._services.forwarder.forward_all(forwarded, terms.route, terms.key, now, directives=terms.directives)

    def _end_pause(self, now: float) -> None:
        if self._paused_at:
            self._waited_s += now - self._paused_at
            self._paused_at = 0.0

    def _count_wait(self, item: BatchItem) -> None:
        """The client's own rate is the cause, so the wait is counted apart from the time that the call took."""
        if self._waited_s:
            item.on_waited(self._waited_s)
            telemetry.rate_wait_seconds.labels("batch").observe(self._waited_s)

    def _refuse_left(self, refusal: Fault) -> None:
        self._refusal = refusal
        self._refund_prepaid()
        self._give_room()
        if self._left:
            self._next("refuse")
        else:
            self._end()

    def _refuse_some(self) -> None:
        """Answer some of the items that are left, and come back for the others."""
        assert self._refusal is not None
        error = rpc_error_of(self._refusal)
        for _ in range(min(REFUSED_PER_STEP, self._left)):
            item = self._accepted.popleft()[0] if self._accepted else self._mistaken.popleft()[0]
            self._count_wait(item)
            item.refuse(self._refusal, error)
        if self._left:
            self._next("refuse")
        else:
            self._end()


def _pause_s(refusal: RateLimited) -> float:
    return refusal.wait_s if isinstance(refusal, LeasePending) else max(LEAST_PAUSE_S, refusal.wait_s)
