"""The state that a caller keeps for its reply, callers that hold a large result, and calls that a coroutine awaits."""

from __future__ import annotations

import asyncio
import time

import msgspec

from proxy.core.directives import AttemptTrace, Directives
from proxy.core.jsonrpc import READ_WHOLE
from proxy.errors import BROKEN_REPLY, Fault, InternalError, Unavailable
from proxy.services.accounts.metering import Meter
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Call, Flight, all_but
from proxy.services.rpc.held_body import NO_ROOM, HeldBody, ReplyShare
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.waiters import WholeResultWaiter
from proxy.wire.upstream import Piece, Upstream, UpstreamConnection


class RpcError(Exception):
    """An error object from an upstream, as received."""

    def __init__(self, error: bytes) -> None:
        super().__init__(error)
        self.error = error


class CallerState:
    """The state that a `Caller` keeps for its reply."""

    __slots__ = ("block", "cache", "flight", "policy", "units", "waited_s")

    def __init__(self) -> None:
        self.policy: MethodPolicy | None = None
        self.flight: Flight | None = None
        self.units = 0
        self.cache = ""
        self.block = 0
        # How long the call waited for its account's rate limit.
        self.waited_s = 0.0

    @property
    def reached(self) -> int:
        """A block that the state behind the result has reached; 0 if it is unknown."""
        return self.block if self.flight is None else self.flight.block

    def on_checked(self, policy: MethodPolicy) -> None:
        self.policy = policy

    def on_admitted(self, units: int) -> None:
        self.units = units

    def on_source(self, cache: str, block: int) -> None:
        self.cache, self.block = cache, block

    def on_flight(self, flight: Flight) -> None:
        self.flight = flight

    def on_charged(self, units: int) -> bool:
        self.units += units
        return True

    def on_waited(self, waited_s: float) -> None:
        self.waited_s += waited_s


class HeldResultWaiter:
    """A waiter that passes on a large result when it is whole. Subclasses declare the attributes and send the result."""

    streams: bool = True
    flight: Flight | None
    body: HeldBody | None

    def new_share(self) -> ReplyShare:
        raise NotImplementedError

    def on_held(self, body: HeldBody) -> None:
        raise NotImplementedError

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        raise NotImplementedError

    def on_error(self, error: bytes) -> None:
        raise NotImplementedError

    def on_fault(self, fault: Fault) -> None:
        raise NotImplementedError

    def on_charged(self, units: int) -> bool:
        raise NotImplementedError

    def on_waited(self, waited_s: float) -> None:
        raise NotImplementedError

    def on_stream(self, beginning: memoryview, left: int | None, connection: UpstreamConnection) -> None:
        share = self.new_share()
        self.body = HeldBody(share, connection, self._give_up)
        if self.body.hold(left, may_wait=left is not None and share.may_wait(left)):
            self.on_stream_piece(beginning)
        else:
            self._give_up()

    def on_stream_piece(self, piece: Piece) -> None:
        if self.body is not None and not self.body.add(piece):
            self._give_up()

    def on_stream_end(self) -> None:
        if self.body is not None:
            body, self.body = self.body, None
            body.end()
            self.on_held(body)

    def on_stream_broken(self) -> None:
        if self.body is not None:
            self.drop_held()
            self.on_fault(InternalError(BROKEN_REPLY, reason="upstream"))

    def _give_up(self) -> None:
        self.drop_held()
        if self.flight is not None:
            self.flight.leave(self)
        self.on_error(NO_ROOM)

    def drop_held(self) -> None:
        if self.body is not None:
            body, self.body = self.body, None
            body.drop()


class PendingReply(CallerState, WholeResultWaiter):
    """A waiter that a coroutine awaits. It keeps nothing of a result that was taken: records list calls until their request has
    ended."""

    __slots__ = ("_future", "is_unavailable")

    def __init__(self) -> None:
        super().__init__()
        self._future: asyncio.Future[bytes | msgspec.Raw] | None = asyncio.get_running_loop().create_future()
        # No upstream could be asked.
        self.is_unavailable = False

    @property
    def is_answered(self) -> bool:
        return self._future is None or self._future.done()

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self._future is not None and not self._future.done():
            # A large one is copied in another turn of the loop.
            self._future.set_result(result if len(result) > READ_WHOLE else bytes(result))

    def on_error(self, error: bytes) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(RpcError(error))

    def on_fault(self, fault: Fault) -> None:
        if self._future is not None and not self._future.done():
            self.is_unavailable = isinstance(fault, Unavailable)
            self._future.set_exception(fault)

    def cancel(self) -> None:
        """Cancel the coroutine that awaits it."""
        if self._future is not None:
            self._future.cancel()

    def drop(self) -> None:
        """The client has left. Subclasses give back the memory that they hold for the reply."""

    @property
    def answered_by(self) -> Upstream | None:
        """The upstream whose reply arrived last."""
        return None if self.flight is None else self.flight.answered_by

    def forget_flight(self) -> None:
        """Let the flight be freed now. It refers to this waiter, so both would wait for the garbage collector, with params that
        may be large."""
        self.flight = None

    async def result(self) -> bytes:
        """The result, once. Raises RpcError for an upstream's error and a Fault for ours."""
        assert self._future is not None
        try:
            return bytes(await self._future)
        except asyncio.CancelledError:
            if self.flight is not None:
                self.flight.leave(self)
            raise
        finally:
            self._future = None


def call_upstream(
    dispatcher: Dispatcher,
    policy: MethodPolicy,
    params: bytes,
    *,
    upstream: Upstream | None = None,
    avoid: Upstream | None = None,
    least_head: int = 0,
    reports_head: bool = False,
    archive: bool = False,
    oldest: int = -1,
    is_piece: bool = False,
    client: str = "",
    payer: Meter | None = None,
    trace: AttemptTrace | None = None,
) -> PendingReply:
    """Make a call without a client: it is neither admitted nor charged, and not answered from the cache. `payer` pays for its
    pieces if it is split.

    With `upstream` the call goes to that upstream and no other. Otherwise the dispatcher chooses one that has reached
    `least_head`, other than `avoid`. See `Call` for the other options.
    """
    call = Call(
        policy,
        params,
        client=client,
        payer=payer,
        directives=None if trace is None else Directives(trace=trace),
        least_head=least_head,
        reports_head=reports_head,
        archive=archive,
        oldest=oldest,
        is_piece=is_piece,
        excluded=all_but(upstream) if upstream is not None else 0 if avoid is None else ~all_but(avoid),
    )
    pending, now = PendingReply(), time.monotonic()
    flight = dispatcher.new_flight(call, pending, now)
    pending.on_flight(flight)
    if upstream is None:
        dispatcher.launch(flight, now)
    else:
        dispatcher.send(flight, upstream, now)
    return pending
