"""The calls of one socket: each message is a call or a batch, served as over HTTP and answered as soon as its reply is ready.

Replies carry the ids of their calls, so a slow call does not delay others. A malformed message is answered by an error on the
socket.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from proxy.core import fault_plans, jsonrpc, large_envelope
from proxy.core.fault_plans import FaultPlan
from proxy.core.jsonrpc import MalformedCall
from proxy.core.pricing import UNITS_OF_AN_ERROR, size_units
from proxy.core.usage import Outcome, outcome_of
from proxy.core.verification import VERIFICATIONS
from proxy.errors import Fault, InternalError, InvalidRequest
from proxy.services.rpc.batches import BatchItem, CallBatch
from proxy.services.rpc.calls import CallerState, HeldResultWaiter
from proxy.services.rpc.finished_call import FinishedCall
from proxy.services.rpc.held_body import FREE_BYTES, NO_ROOM, HeldBody, ReplyShare
from proxy.services.rpc.method_policy import invented_name_of, method_of
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.web.fault_injection import fault_of_status, plan_for
from proxy.web.websocket.frames import LARGE_MESSAGE, frame_header
from proxy.web.websocket.socket_context import SocketContext, SocketTerms
from proxy.web.websocket.socket_output import SocketOutput
from proxy.web.websocket.subscriptions import Subscriptions

_serial = itertools.count()
_AROUND_A_RESULT = len(jsonrpc.ENVELOPE_START) + len(',"result":}')


class SocketCalls:
    """The calls and batches of one socket that are under way."""

    __slots__ = (
        "_delayed",
        "_on_answered",
        "_served",
        "_under_way",
        "bytes_under_way",
        "context",
        "directives",
        "key",
        "output",
        "request_id",
        "route",
        "subscriptions",
    )

    def __init__(
        self,
        context: SocketContext,
        output: SocketOutput,
        subscriptions: Subscriptions,
        terms: SocketTerms,
        *,
        on_answered: Callable[[], None],
    ) -> None:
        """`on_answered` is called after each reply."""
        self.context = context
        self.output = output
        self.subscriptions = subscriptions
        self.route = terms.route
        self.key = terms.key
        self.request_id = terms.request_id
        self.directives = terms.directives
        self._on_answered = on_answered
        # The calls under way, with the sizes of their messages.
        self._under_way: dict[SocketCall | SocketBatch, int] = {}
        self.bytes_under_way = 0
        self._served = 0
        # Messages that wait for the latency of a fault plan, with their sizes. They count as under way, which bounds them for
        # the socket, and in the memory for bodies, which bounds them for the account.
        self._delayed: dict[int, tuple[asyncio.TimerHandle, int]] = {}

    def __repr__(self) -> str:
        return f"<SocketCalls {len(self._under_way)} under way>"

    def __len__(self) -> int:
        return len(self._under_way) + len(self._delayed)

    def serve(self, message: bytes) -> None:
        is_faulty = self.directives is not None and self.directives.fault is not None
        plan = plan_for(self.directives) if is_faulty else None
        if plan is None:
            self._serve(message)
        elif plan.latency_ms:
            self._delay(plan, message)
        else:
            self._serve_with_faults(plan, message)

    def _delay(self, plan: FaultPlan, message: bytes) -> None:
        size = len(message)
        if (refusal := self.context.limiter.take_body(self.key.account.id, size)) is not None:
            self.on_refusal(size)
            error = rpc_error_of(refusal)
            self._answer_with_faults(
                fault_plans.error_replies(message, error) or jsonrpc.error_reply(jsonrpc.NULL, error)
            )
            self.note_failure(self._served, refusal, 0)
            return
        place = next(_serial)
        later = self.context.loop.call_later(plan.latency_ms / 1000, self._serve_delayed, place, plan, message)
        self._delayed[place] = later, size
        self.bytes_under_way += size

    def _serve_delayed(self, place: int, plan: FaultPlan, message: bytes) -> None:
        del self._delayed[place]
        self.bytes_under_way -= len(message)
        self.context.limiter.give_back_body(self.key.account.id, len(message))
        self._serve_with_faults(plan, message)
        self._on_answered()

    def _serve_with_faults(self, plan: FaultPlan, message: bytes) -> None:
        """Serve a message of a test key with the faults of its plan."""
        transport = self.output.transport
        if transport is None:
            return
        if plan.reset or plan.truncate:
            transport.abort()
        elif plan.error or plan.status:
            error = fault_plans.error_of(plan) if plan.error else rpc_error_of(fault_of_status(plan.status))
            if (refusal := self.context.rpc.charge_error(self.key, time.monotonic())) is not None:
                error = rpc_error_of(refusal)
            self._answer_with_faults(fault_plans.error_replies(message, error) or b"[]")
            self.note_failure(self._served, refusal or InternalError("injected by X-Fault"), UNITS_OF_AN_ERROR)
        else:
            aged = fault_plans.aged(message, self.route.heads.tip, plan.stale) if plan.stale else message
            self._serve(aged, plan if plan.empty or plan.stale else None)

    def _answer_with_faults(self, replies: bytes) -> None:
        self.output.send(self.output.message(replies))
        self._served += 1

    def _serve(self, message: bytes, plan: FaultPlan | None = None) -> None:
        """`plan`: how to change the results."""
        now = time.monotonic()
        self._served += 1
        try:
            if jsonrpc.is_batch(message):
                SocketBatch(self, now, self._served, plan).start(message)
            else:
                SocketCall(self, now, self._served, plan).start(message)
        except MalformedCall as exc:
            self.refuse(exc, self._served, len(message))

    def refuse(self, exc: MalformedCall, number: int, size: int) -> None:
        """Answer a malformed message with an error, and charge for it: a malformed message must not be free."""
        admission, now = self.context.admission, time.monotonic()
        units = UNITS_OF_AN_ERROR + size_units(size)
        refusal = admission.charge(self.key, 1, units, now)
        if admission.may_wait(refusal, now):
            admission.when_leased(self.key, 1, units, partial(self.refuse, exc, number, size))
            return
        if refusal is not None:
            self.on_refusal(size)
        error = rpc_error_of(refusal) if refusal is not None else jsonrpc.error(exc.code, exc.message)
        id_ = (exc.id or jsonrpc.NULL) + self.meta(number)
        self.output.send(self.output.message(jsonrpc.error_reply(id_, error)))
        self.note_failure(number, refusal or InvalidRequest(exc.message), 0 if refusal is not None else units)

    def on_refusal(self, size: int) -> None:
        """A refused message costs nothing. If it was large, the account's next large one has to wait."""
        if size >= LARGE_MESSAGE:
            self.context.large_messages.pause(self.key.account.id)

    def add(self, call: SocketCall | SocketBatch, size: int) -> None:
        self._under_way[call] = size
        self.bytes_under_way += size

    def size_of(self, call: SocketCall | SocketBatch) -> int:
        """The size of its message, while it is under way."""
        return self._under_way.get(call, 0)

    def answered(self, call: SocketCall | SocketBatch, method: str, *, outcome: str, units: int, took_s: float) -> None:
        self.bytes_under_way -= self._under_way.pop(call, 0)
        self.context.accounting.log_message(
            self.request_id, self.route.network.id, self.key, method, outcome=outcome, units=units, took_s=took_s
        )
        self._on_answered()

    def name_of(self, number: int) -> str:
        """The id of one message's record: that of the handshake, and the message's number."""
        return f"{self.request_id}.{number}"

    def note_failure(self, number: int, fault: Fault, units: int = 0) -> None:
        """Record a message that was refused before it became a call."""
        self.context.accounting.record(
            FinishedCall(
                request_id=self.name_of(number),
                key=self.key,
                network=self.route.network.id,
                took_s=0.0,
                surface="socket",
                status=fault.status,
                outcome=outcome_of(fault),
                units=units,
                error=fault.message,
                directives=self.directives,
            )
        )

    def meta(self, number: int | str, answer: SocketCall | BatchItem | None = None) -> bytes:
        """The member `meta` of a reply, to follow its id; empty for sockets that did not ask for it."""
        if self.directives is None or not self.directives.meta:
            return b""
        members: dict[str, str | int] = {"request_id": f"{self.request_id}.{number}"}
        if answer is not None:
            members["units"] = answer.units
            members.update({"block": answer.reached} if answer.reached else {})
            if answer.cache:
                members["verified" if answer.cache in VERIFICATIONS else "cache"] = answer.cache
        return b',"meta":' + msgspec.json.encode(members)

    def leave(self) -> None:
        """The client has left: give up all calls under way."""
        calls, self._under_way, self.bytes_under_way = self._under_way, {}, 0
        for later, size in self._delayed.values():
            later.cancel()
            self.context.limiter.give_back_body(self.key.account.id, size)
        self._delayed.clear()
        for call in calls:
            call.leave()


class SocketCall(CallerState, HeldResultWaiter):
    """A single call, and the waiter of its outcome. A large result is held until it is a whole message."""

    __slots__ = (
        "_began",
        "_failure",
        "_number",
        "_owner",
        "_params",
        "_plan",
        "_size",
        "_status",
        "body",
        "id",
    )

    def __init__(self, owner: SocketCalls, now: float, number: int, plan: FaultPlan | None) -> None:
        super().__init__()
        self._owner = owner
        self._began = now
        self._number = number
        self._plan = plan
        self.id = b""
        self.body: HeldBody | None = None
        # For the record of the call.
        self._params = b""
        self._failure = ""
        self._status = 200
        self._size = 0

    def __repr__(self) -> str:
        return f"<SocketCall {self.policy!r}>"

    def start(self, message: bytes) -> None:
        owner = self._owner
        call = large_envelope.read_call(message) if len(message) >= LARGE_MESSAGE else None
        call = call or jsonrpc.parse(message, None, owner.route.dialect)
        owner.add(self, len(message))
        self.id = call[2]
        self._params = call[1] if owner.key.records_params else b""
        owner.context.rpc.call(
            self,
            owner.route,
            owner.key,
            call,
            self._began,
            directives=owner.directives,
            subscriber=owner.subscriptions,
        )

    def leave(self) -> None:
        if self.flight is not None:
            self.flight.leave(self)
        self.drop_held()

    def _reply_id(self) -> bytes:
        """The id of the reply, with the member `meta` if the socket asked for it."""
        return self.id if self._owner.directives is None else self.id + self._owner.meta(self._number, self)

    def new_share(self) -> ReplyShare:
        return self._owner.context.rpc.reply_share(self._owner.key.account.id)

    def on_held(self, body: HeldBody) -> None:
        self._size = body.size
        if self.id:
            start = jsonrpc.result_start(self._reply_id())
            self._owner.output.send_large([frame_header(len(start) + self._size), start, *body.parts], body.share)
        else:
            body.drop()
        self._end("results")

    def on_result(self, result: bytes | msgspec.Raw) -> None:
        if self._plan is not None and self.policy is not None and self.policy.method.kind != "subscription":
            is_head = self.policy.is_head_number
            result = fault_plans.faulty_result(self._plan, bytes(result), is_head=is_head)
        self._size = len(result)
        id_ = self.id and self._reply_id()
        output = self._owner.output
        if id_ and len(result) > FREE_BYTES:
            self._send_whole(result)
            return
        if id_ and len(result) >= output.compress_from:
            output.send(output.message(b"".join((jsonrpc.ENVELOPE_START, id_, b',"result":', result, b"}"))))
        elif id_:
            header = frame_header(len(id_) + len(result) + _AROUND_A_RESULT)
            output.send(b"".join((header, jsonrpc.ENVELOPE_START, id_, b',"result":', result, b"}")))
        self._end("results")

    def _send_whole(self, result: bytes | msgspec.Raw) -> None:
        """Send a large result that was not streamed: a cached one, or one that several callers wait for."""
        share, start = self.new_share(), jsonrpc.result_start(self._reply_id())
        if not share.take(len(result)):
            self.on_error(NO_ROOM)
            return
        header = frame_header(len(start) + len(result) + 1)
        self._owner.output.send_large([header, start, memoryview(result), b"}"], share)
        self._end("results")

    def on_error(self, error: bytes) -> None:
        self._failure, self._size = error.decode("utf-8", "replace"), len(error)
        if self.id:
            self._owner.output.send(self._owner.output.message(jsonrpc.error_reply(self._reply_id(), error)))
        self._end("errors")

    def on_fault(self, fault: Fault) -> None:
        owner = self._owner
        owner.on_refusal(owner.size_of(self))
        self.units = owner.context.accounting.refund(owner.key, fault, self.units)
        self._failure, self._status = fault.message, fault.status
        if self.id:
            owner.output.send(owner.output.message(jsonrpc.error_reply(self._reply_id(), rpc_error_of(fault))))
        self._end(outcome_of(fault))

    def _end(self, outcome: Outcome) -> None:
        owner, accounting = self._owner, self._owner.context.accounting
        took_s, method = time.monotonic() - self._began, method_of(self.policy)
        accounting.count(owner.key, self, outcome, took_s)
        accounting.record(
            FinishedCall(
                request_id=owner.name_of(self._number),
                key=owner.key,
                network=owner.route.network.id,
                took_s=took_s,
                surface="socket",
                method=method,
                invented_name=invented_name_of(self.policy),
                status=self._status,
                outcome=outcome,
                units=self.units,
                cache=self.cache,
                size=self._size,
                block=self.reached,
                error=self._failure,
                params=self._params,
                directives=owner.directives,
                flight=self.flight,
            )
        )
        owner.answered(self, method, outcome=outcome, units=self.units, took_s=took_s)


class SocketBatch:
    """A batch of calls."""

    __slots__ = ("_batch", "_began", "_body", "_is_done", "_number", "_owner", "_plan")

    def __init__(self, owner: SocketCalls, now: float, number: int, plan: FaultPlan | None) -> None:
        self._owner = owner
        self._began = now
        self._number = number
        self._batch: CallBatch | None = None
        self._is_done = False
        self._plan = plan
        self._body = b""

    def __repr__(self) -> str:
        return f"<SocketBatch {self._batch!r}>"

    def start(self, body: bytes) -> None:
        owner = self._owner
        owner.add(self, len(body))
        self._body = b"" if self._plan is None else body
        batch = owner.context.rpc.call_batch(
            body,
            owner.route,
            owner.key,
            self._began,
            self._on_batch,
            self._on_refused,
            directives=owner.directives,
            subscriber=owner.subscriptions,
        )
        if not self._is_done:
            self._batch = batch

    def _on_refused(self, why: Fault | MalformedCall, ids: Sequence[bytes]) -> None:
        """Send the error for every call of the batch, under its id: a client waits for each id."""
        self._is_done = True
        owner = self._owner
        if isinstance(why, MalformedCall):
            owner.refuse(why, self._number, owner.size_of(self))
        else:
            owner.on_refusal(owner.size_of(self))
            meta, error = owner.meta(self._number), rpc_error_of(why)
            if replies := [jsonrpc.error_reply(id_ + meta, error) for id_ in ids if id_]:
                owner.output.send(owner.output.message(b"[" + b",".join(replies) + b"]"))
            owner.note_failure(self._number, why)
        self._end("upstream_faults", 0)

    def leave(self) -> None:
        if self._batch is not None:
            self._owner.context.accounting.leave_batch(self._owner.key, self._batch)

    def _on_batch(self, batch: CallBatch) -> None:
        self._is_done = True
        owner = self._owner
        units = owner.context.accounting.settle_batch(owner.key, batch)
        pieces = self._pieces(batch)
        if pieces and self._plan is not None and not batch.share.is_large:
            heads = [name for name, policy in owner.route.policies.items() if policy.is_head_number]
            pieces = [fault_plans.faulty(self._plan, self._body, b"".join(pieces), heads)]
        owner.context.accounting.record(
            FinishedCall(
                request_id=owner.name_of(self._number),
                key=owner.key,
                network=owner.route.network.id,
                took_s=time.monotonic() - self._began,
                units=units,
                size=sum(map(len, pieces)),
                directives=owner.directives,
                batch=batch,
            )
        )
        if batch.share.is_large:
            owner.output.send_large([frame_header(sum(map(len, pieces))), *pieces], batch.share)
        elif pieces:
            owner.output.send(owner.output.message(b"".join(pieces)))
        if batch.items:  # Plain reads have none, and do not subscribe.
            owner.subscriptions.confirm(batch.items)
        self._end("results", units)

    def _pieces(self, batch: CallBatch) -> list[bytes | memoryview]:
        """The reply, with the member `meta` in each item if the socket asked for it."""
        owner = self._owner
        if owner.directives is None or not owner.directives.meta:
            return batch.pieces()
        parts: list[bytes | memoryview] = []
        for index, item in enumerate(batch.items):
            if pieces := item.pieces():
                end = len(jsonrpc.ENVELOPE_START) + len(item.id or jsonrpc.NULL)
                meta = owner.meta(f"{self._number}.{index}", item)
                first = bytes(pieces[0])
                parts += (b"," if parts else b"[", first[:end], meta, first[end:], *pieces[1:])
        return [*parts, b"]"] if parts else []

    def _end(self, outcome: str, units: int) -> None:
        self._batch = None  # Breaks a reference cycle, which would keep the message until the garbage collector runs.
        took_s = time.monotonic() - self._began
        self._owner.answered(self, "batch", outcome=outcome, units=units, took_s=took_s)
