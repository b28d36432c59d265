"""The end of every call: refunded if it failed through our fault, counted, logged, and recorded.

The hot path, the handlers behind aiohttp and the sockets all end their calls here. A call is refunded before its reply is
written, because replies show the price; it is logged and recorded (`services/request_recorder.py`) once its status is known.
"""

from __future__ import annotations

import time
from typing import Final, final

from proxy.core.access import Key
from proxy.core.iso_time import iso_of_unix
from proxy.core.pricing import UNITS_OF_AN_ERROR
from proxy.core.usage import Outcome, Tally
from proxy.errors import Fault, Forbidden, InternalError, RateLimited
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.metering import Meter
from proxy.services.request_recorder import RequestRecorder
from proxy.services.rpc.batches import CallBatch
from proxy.services.rpc.finished_call import FinishedCall
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import method_of
from proxy.services.usage import UsageService
from proxy.telemetry import AccessLines
from proxy.web.front.request_headers import RequestHeaders

_LINE: Final = b'{"time":"%b","level":"info","logger":"penstock.access","message":"'
_REQUEST: Final = (
    _LINE + b'request","request_id":"%b","network":"%b","method":"%b","status":%d,"ms":%.3f,"key":"%b","units":%d,'
    b'"cache":"%b"}\n'
)
_MESSAGE: Final = (
    _LINE + b'message","request_id":"%b","network":"%b","method":"%b","outcome":"%b","ms":%.3f,"key":"%b","units":%d}\n'
)


@final
class CallAccounting:
    def __init__(
        self, admission: Admission, usage: UsageService, recorder: RequestRecorder, log: AccessLines | None
    ) -> None:
        """`log`: the access log, if there is one."""
        self._admission = admission
        self._usage = usage
        self._log = log
        self._log_time = b""
        self._recorder = recorder
        self.logs = log is not None
        # Calls that take longer are recorded.
        self.slow_s = recorder.slow_s
        self.tick()

    def __repr__(self) -> str:
        return f"<CallAccounting {self._recorder!r}>"

    def tick(self) -> None:
        """Refresh the time in log lines. Called once a second."""
        self._log_time = iso_of_unix(time.time()).encode()

    # Refunds

    def refund(self, key: Key, fault: Fault, units: int) -> int:
        """Refund a call that failed through our fault, and return what it still costs: the further upstream calls that were
        made for it, and its own price if it is not refunded."""
        further, keeps_price = fault.take_kept()
        if keeps_price or not isinstance(fault, InternalError):
            return units + further
        self._admission.refund(key, 1, units)
        return further

    def refund_unused(self, meter: Meter, fault: Fault) -> None:
        """Refund what a metered request that failed has not used. A client's mistake is not free."""
        is_free = isinstance(fault, InternalError | Forbidden | RateLimited)
        if not meter.settle(0 if is_free else UNITS_OF_AN_ERROR):
            self._admission.refund(meter.key, 1, 0)

    def settle_batch(self, key: Key, batch: CallBatch) -> int:
        """Count the items of a batch that are answered, and refund those that failed through our fault. Returns the price of
        the batch."""
        if batch.plain:
            self._count_plain(key, batch)
        units = batch.units
        for item in batch.items:
            if item.fault is not None:
                units -= item.units
                item.on_refunded(self.refund(key, item.fault, item.units))
                units += item.units
            if item.outcome:
                self.count(key, item, item.outcome, item.took_s)
        return units

    def leave_batch(self, key: Key, batch: CallBatch) -> None:
        """The client has left before its batch was done: items that are answered count nevertheless."""
        batch.leave()
        self.settle_batch(key, batch)

    # Counts

    def count(self, key: Key, caller: Caller, outcome: Outcome, took_s: float) -> None:
        """Count a call whose method is known. The time that it waited for its account's rate limit is counted elsewhere."""
        if caller.policy is not None:
            key.tallies[caller.policy.tally].count(outcome, caller.cache, caller.units, took_s - caller.waited_s)

    def _count_plain(self, key: Key, batch: CallBatch) -> None:
        """Count plain reads, those of one method together."""
        counted, same = batch.plain[0][0], 0
        for policy, _ in batch.plain:
            if policy is not counted:
                key.tallies[counted.tally].count_results(same, counted.units, batch.took_s)
                counted, same = policy, 0
            same += 1
        key.tallies[counted.tally].count_results(same, counted.units, batch.took_s)

    def of_operation(self, key: Key, network: str, operation: str) -> Tally:
        """The tally of a key for a REST operation, or for a method that is not sent to the network, such as a paymaster's."""
        return self._usage.of_operation(key, network, operation)

    # The access log and the record

    def log_request(
        self, headers: RequestHeaders, caller: Caller, status: int, request_id: bytes, took_s: float
    ) -> None:
        """Add the line of a request on the hot path. aiohttp's requests are logged by the middleware, with their paths."""
        if self._log is not None:
            network, method = headers.route.network.id.encode(), method_of(caller.policy).encode()
            key, cache, ms = headers.key.id.encode(), caller.cache.encode(), took_s * 1000
            line = (self._log_time, request_id, network, method, status, ms, key, caller.units, cache)
            self._log.add(_REQUEST % line)

    def log_message(
        self, request_id: str, network: str, key: Key, method: str, *, outcome: str, units: int, took_s: float
    ) -> None:
        """Add the line of a message on a socket. `request_id`: that of the handshake."""
        if self._log is not None:
            names = (request_id.encode(), network.encode(), method.encode(), outcome.encode())
            self._log.add(_MESSAGE % (self._log_time, *names, took_s * 1000, key.id.encode(), units))

    def record(self, call: FinishedCall) -> None:
        self._recorder.record(call)
