"""Records of requests, from the moment a reply is written until the log of requests writes them (`request_log.py`).

Recording never blocks a call. The memory is bounded, in all and for each account, and records beyond that are dropped and
counted: a client that fails a thousand times a second leaves room for the records of others. The bytes of an account are
bounded too, at once, per second and per day: params, which are large and chosen by the client, are left out first.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from msgspec.structs import replace

from proxy.core.access import Account
from proxy.core.directives import Directives
from proxy.core.request_records import (
    MOST_ERROR,
    MOST_NAME,
    MOST_PARAMS,
    OWN_PREFIX,
    RecordedAttempt,
    RecordReason,
    RequestRecord,
    blame_of,
    code_of,
    shown_text,
)
from proxy.core.usage import outcome_of
from proxy.memory_budget import BudgetLine
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.finished_call import FinishedCall
from proxy.services.rpc.flights import cost_of
from proxy.services.rpc.internal_calls import attempts_of
from proxy.services.rpc.method_policy import invented_name_of, method_of

# Records of one account in this worker: this many at once, and then this many a second. A client that is refused a
# thousand times a second must not fill the disk.
MOST_OF_ACCOUNT: Final = 512
MORE_PER_S: Final = 10
# Bytes of one account's records in this worker: this many at once, then this many a second, and this many in a day (UTC). They
# bound the disk that an account fills: a record without params has about 300 bytes, one with params up to 3,000.
BYTES_AT_ONCE: Final = 1 << 19
BYTES_PER_S: Final = 4096
BYTES_PER_DAY: Final = 64 << 20
# The size of a record without its texts, and the further memory that it takes while it waits.
BARE_RECORD: Final = 200
RECORD_OBJECT: Final = 800
# Items of one batch: more of them would delay other clients by milliseconds.
MOST_OF_BATCH: Final = 64


class RequestRecorder:
    __slots__ = (
        "_bytes",
        "_bytes_of_day",
        "_day",
        "_dropped",
        "_is_on",
        "_memory",
        "_of_account",
        "_serial",
        "_since",
        "_sizes",
        "_stem",
        "slow_s",
        "waiting",
    )

    def __init__(self, memory: BudgetLine, *, slow_s: float, is_on: bool) -> None:
        """`memory`: for records that wait until they are written."""
        self._memory = memory
        self._is_on = is_on
        self.slow_s = slow_s if is_on else math.inf
        self.waiting: list[RequestRecord] = []
        # The memory that each of them takes.
        self._sizes: list[int] = []
        # Records that were dropped and are not counted in the metrics yet.
        self._dropped = 0
        # The records that each account has used of its allowance, and since when.
        self._of_account: dict[str, int] = {}
        # The same for their bytes, and the bytes of each account in this day.
        self._bytes: dict[str, int] = {}
        self._bytes_of_day: dict[str, int] = {}
        self._day = 0
        self._stem = ""
        self._serial = 0
        self._since = time.monotonic()

    def __repr__(self) -> str:
        return f"<RequestRecorder {len(self.waiting)} waiting>"

    def reason(
        self, account: Account, took_s: float, directives: Directives | None, *, failed: bool
    ) -> RecordReason | None:
        """Why a request is recorded; None if it is not."""
        if account.captured_until:
            account.is_captured(time.time())
        is_sampled = account.is_sampled()
        if not self._is_on:
            return None
        if failed:
            return "failed"
        if took_s > self.slow_s:
            return "slow"
        if directives is not None and directives.explain:
            return "asked"
        return "sampled" if is_sampled else None

    def record(self, call: FinishedCall) -> None:
        """Record the call, if it is to be recorded."""
        if call.batch is not None:
            self._record_batch(call, call.batch)
            return
        reason = self.reason(call.key.account, call.took_s, call.directives, failed=call.error != "")
        if reason is not None:
            self._add(call, reason, *self._ids(call.request_id))

    def _record_batch(self, call: FinishedCall, batch: CallBatch) -> None:
        """Record a batch and its failed items, or all its items if it is recorded for another reason or captured: the first
        MOST_OF_BATCH at most."""
        failed = [index for index, item in enumerate(batch.items) if item.failure]
        took_s = call.took_s
        if took_s > self.slow_s:  # The client's own rate limit does not make a batch slow.
            took_s -= max([item.waited_s for item in batch.items], default=0.0)
        reason = self.reason(call.key.account, took_s, call.directives, failed=bool(failed))
        if reason is None:
            return
        request_id, client_id = self._ids(call.request_id)
        whole = replace(
            call, surface="batch", method="batch", invented_name="", status=200, cache="", error="", block=batch.reached
        )
        self._add(whole, reason, request_id, client_id)
        is_part = reason == "failed" and not call.key.account.captured_until
        chosen = failed if is_part else list(range(len(batch.items) or len(batch.plain)))
        for index in chosen[: self._room_for(call.key.account, len(chosen))]:
            item_id = f"{client_id}.{index}" if client_id else ""
            self._add(_item_of(whole, batch, index), reason, f"{request_id}.{index}", item_id)

    def _add(self, call: FinishedCall, reason: RecordReason, request_id: str, client_id: str) -> None:
        key = call.key
        account = key.account.id
        is_captured = key.account.captured_until > 0.0
        if not self._room(key.account):
            self._dropped += 1
            return
        attempts = _attempts_of(call)
        error = shown_text(call.error, MOST_ERROR) if call.error else ""
        params = call.params or (b"" if call.flight is None else call.flight.params)
        shown = _params(params) if key.records_params and params else None
        size = BARE_RECORD + len(error) + sum(len(each[0]) + len(each[3]) + 40 for each in attempts)
        if shown is not None and not self._takes(key.account, size + min(len(params), MOST_PARAMS)):
            shown = None
        if shown is None and not self._takes(key.account, size):
            self._dropped += 1
            return
        if not is_captured:
            self._of_account[account] = self._of_account.get(account, 0) + 1
        self.waiting.append(
            RequestRecord(
                id=request_id,
                at=time.time(),
                account=account,
                key=key.id,
                network=call.network,
                surface=call.surface,
                method=call.method,
                called=shown_text(call.invented_name, MOST_NAME) if call.invented_name else "",
                status=call.status,
                reason=reason,
                units=call.units,
                cost=_cost_of(call),
                cache=call.cache,
                took_s=call.took_s,
                bytes=call.size,
                block=call.block if call.status < 400 else 0,  # A refusal says nothing about the state.
                error=error,
                blame=blame_of(call.outcome, call.status) if error else "",
                code=code_of(call.status, error) if error else "",
                attempts=attempts,
                params=shown,
                client_id=client_id,
            )
        )

    def _ids(self, request_id: str) -> tuple[str, str]:
        """An id of ours, and the one that the client chose, if it did. The stem is drawn at first use, after workers are
        forked."""
        if request_id.startswith(OWN_PREFIX):
            return request_id, ""
        self._serial += 1
        if not self._stem:
            self._stem = f"{OWN_PREFIX}{secrets.token_hex(5)}"
        return f"{self._stem}c{self._serial:07x}", request_id

    def _takes(self, holder: Account, size: int) -> bool:
        """Take bytes from the account's allowance, unless it has too few left. While all its calls are captured, they are
        bounded by the allowance of the day and the memory alone."""
        account = holder.id
        used = self._bytes.get(account, 0) + (0 if holder.captured_until else size)
        of_day = self._bytes_of_day.get(account, 0) + size
        if used > BYTES_AT_ONCE or of_day > BYTES_PER_DAY or not self._memory.take(account, size + RECORD_OBJECT):
            return False
        self._bytes[account], self._bytes_of_day[account] = used, of_day
        self._sizes.append(size + RECORD_OBJECT)
        return True

    def _room(self, account: Account) -> int:
        used = 0 if account.captured_until else self._of_account.get(account.id, 0)
        return max(0, MOST_OF_ACCOUNT - used)

    def _room_for(self, account: Account, items: int) -> int:
        """How many of a batch's items are recorded. The others count as dropped."""
        room = min(items, MOST_OF_BATCH, self._room(account))
        self._dropped += items - room
        return room

    # Called by the log of requests

    def allow_more(self, now: float, *, day: int = 0) -> None:
        """Refill the allowances of accounts for the time that has passed. `day`: a number that changes with the UTC day."""
        more = int((now - self._since) * MORE_PER_S)
        if more:
            self._since += more / MORE_PER_S
            self._of_account = {name: used - more for name, used in self._of_account.items() if used > more}
            bytes_more = more * BYTES_PER_S // MORE_PER_S
            self._bytes = {name: used - bytes_more for name, used in self._bytes.items() if used > bytes_more}
        if day != self._day:
            self._day = day
            self._bytes_of_day.clear()

    def forget(self, count: int) -> None:
        """The oldest records were written."""
        sizes: dict[str, int] = {}
        for record, size in zip(self.waiting[:count], self._sizes, strict=False):
            sizes[record.account] = sizes.get(record.account, 0) + size
        del self.waiting[:count], self._sizes[:count]
        for account, size in sizes.items():
            self._memory.give_back(account, size)

    def drop_waiting(self) -> None:
        self._dropped += len(self.waiting)
        self.forget(len(self.waiting))

    def take_dropped(self) -> int:
        """How many records were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped


def _item_of(whole: FinishedCall, batch: CallBatch, index: int) -> FinishedCall:
    """An item of the batch."""
    if batch.plain:  # All were answered together, by the same upstream.
        policy, call = batch.plain[index]
        return replace(
            whole,
            surface="item",
            batch=None,
            method=policy.method.name,
            units=policy.units,
            size=0,
            params=call[1],
            attempts=((batch.answered_label, 0.0, whole.took_s, "answered"),),
        )
    item = batch.items[index]
    return replace(
        whole,
        surface="item",
        batch=None,
        method=method_of(item.policy),
        invented_name=invented_name_of(item.policy),
        status=item.fault.status if item.fault is not None else 200,
        outcome=outcome_of(item.fault) if item.fault is not None else "errors",
        took_s=item.took_s,
        units=item.units,
        cache=item.cache,
        size=item.size,
        block=item.reached,
        error=item.failure,
        params=item.params,
        flight=item.flight,
    )


def _attempts_of(call: FinishedCall) -> Sequence[RecordedAttempt]:
    """In the order in which they began."""
    now = time.monotonic()
    if call.flight is not None:
        return sorted(call.flight.attempts(now), key=itemgetter(1))
    return attempts_of(call.calls, now - call.took_s) if call.calls else call.attempts


def _cost_of(call: FinishedCall) -> int:
    if call.batch is not None:
        return sum(cost_of(item.flight, item.cache) for item in call.batch.items)
    return call.cost if call.flight is None else cost_of(call.flight, call.cache)


def _params(params: bytes) -> str:
    """The beginning of the params. They are cut as bytes, so that `MOST_PARAMS` bounds their size in any script."""
    return shown_text(params[: MOST_PARAMS + 64].decode("utf-8", "replace"), MOST_PARAMS)
