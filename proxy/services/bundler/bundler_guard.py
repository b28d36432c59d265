"""Operations on their way to a bundler: parsed field by field, recorded, and sent once.

The request is rebuilt from the parsed fields, so a bundler never receives a member that was not checked. An operation is
recorded under the hash that the EntryPoint will give it before it is sent, so that none is lost whatever happens next. The
bundler must reply with that hash. After any other reply the operation may have been accepted, so the client gets a fault that
includes the hash.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from proxy.chains.evm import abi, reached_contracts, user_operation
from proxy.chains.evm.bundler_methods import SEND
from proxy.chains.evm.user_operation import BadOperation, UserOperation
from proxy.chains.registry import Network
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.bounded_json import RefusedJson, parse_bounded
from proxy.core.directives import Directives
from proxy.errors import Fault, InternalError, Unavailable
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Call, Caller, Flight
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.store.postgres.operations import OperationStore, SentOperation
from proxy.tasks import Tasks, client_of_task

log = logging.getLogger("penstock.bundler")

_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class BundlerParams:
    """The parsed params of a call."""

    operation: UserOperation
    fields: Mapping[str, Any]
    entry_point: str
    overrides: bytes

    def params(self) -> bytes:
        """The params as JSON, rebuilt from the parsed fields."""
        parts = [orjson.dumps(self.fields), orjson.dumps(self.entry_point)]
        return b"[%b]" % b",".join((*parts, self.overrides) if self.overrides else parts)


class BundlerGuard:
    """Guards the bundlers of one network."""

    def __init__(
        self, dispatcher: Dispatcher, store: OperationStore, internal_calls: InternalCalls, tasks: Tasks, meters: Meters
    ) -> None:
        self._dispatcher = dispatcher
        self._meters = meters
        self._network: Network = dispatcher.state.network
        self._store = store
        self._internal_calls = internal_calls
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<BundlerGuard of {self._network.id}>"

    def read(self, policy: MethodPolicy, params: bytes) -> BundlerParams:
        """Parse the params. Raises BadOperation with the reason if they are not valid."""
        items = _params(params)
        sends = policy.method.name == SEND
        if not 2 <= len(items) <= (2 if sends else 3):
            wanted = "the operation and the entry point" + ("" if sends else ", and perhaps state overrides")
            raise BadOperation(f"params: must be an array of {wanted}")
        fields, entry_point = (_decoded(item) for item in items[:2])
        overrides = bytes(items[2]) if len(items) > 2 else b""
        if overrides and overrides[:1] != b"{":
            raise BadOperation("params.2: the state overrides must be an object")
        if not isinstance(entry_point, str):
            raise BadOperation("entryPoint: must be an address")
        version = user_operation.version_of(entry_point, self._network.chain.entry_points)
        fields = user_operation.in_shape_of(fields, version)
        return BundlerParams(user_operation.parse(fields, version, draft=not sends), fields, entry_point, overrides)

    def fault_of(self, policy: MethodPolicy, params: bytes) -> bytes | None:
        try:
            self.read(policy, params)
        except BadOperation as exc:
            return jsonrpc.error(jsonrpc.INVALID_PARAMS, str(exc))
        return None

    def contracts_of(self, policy: MethodPolicy, params: bytes) -> Sequence[str] | None:
        """The contracts that the operation reaches; None if it may reach any. Raises BadOperation like `read`."""
        given = self.read(policy, params)
        return reached_contracts.of_operation(given.operation, given.overrides)

    def flight(
        self, caller: Caller, key: Key, policy: MethodPolicy, params: bytes, now: float, directives: Directives | None
    ) -> Flight | None:
        """An estimate is an ordinary read. A send waits until it is recorded, and is answered by a task."""
        given = self.read(policy, params)
        if policy.method.name != SEND:
            call = Call(policy, given.params(), client=key.account.id, payer=key, directives=directives)
            flight = self._dispatcher.new_flight(call, caller, now)
            caller.on_flight(flight)
            return flight
        self._tasks.start_once("send", lambda: self._send(caller, key, policy, given), of=next(_serial))
        return None

    # Sending

    async def _send(self, caller: Caller, key: Key, policy: MethodPolicy, given: BundlerParams) -> None:
        """Send the operation and answer the caller once. No exception leaves this, because the task would be run again."""
        client_of_task.set(key.account.id)
        meter = self._meters.open(key, within_s=self._dispatcher.call_timeout_s)
        meter_of_task.set(meter)
        try:
            outcome = await self._outcome(key, policy, given)
        except Fault as fault:
            outcome = fault
        except Exception:
            log.exception("sending an operation failed", extra={"network": self._network.id})
            outcome = InternalError("internal error; the operation was not sent")
        if units := meter.settle(0):
            outcome.keep(units) if isinstance(outcome, Fault) else caller.on_charged(units)
        caller.on_waited(meter.waited_s)
        match outcome:
            case bytes():
                caller.on_result(outcome)
            case RpcError():
                caller.on_error(outcome.error)
            case Fault():
                caller.on_fault(outcome)

    async def _outcome(self, key: Key, policy: MethodPolicy, given: BundlerParams) -> bytes | RpcError | Fault:
        entry_point = bytes.fromhex(given.entry_point[2:])
        operation_hash = user_operation.hash_of(
            given.operation,
            entry_point,
            self._network.facts.chain_id or 0,
            delegate=await self._delegate(given.operation),
        )
        params = given.params()
        sent = SentOperation(
            self._network.id,
            operation_hash,
            key.lineage,
            key.id,
            entry_point,
            given.operation,
            orjson.dumps(given.fields),
            self._newest_block(),
        )
        await self._store.record(sent)
        return await self._submit(key, policy, params, sent)

    def _newest_block(self) -> int | None:
        chain = self._dispatcher.state.chain
        return None if chain is None else chain.heads.tip or None

    async def _delegate(self, operation: UserOperation) -> bytes | None:
        """The sender's current delegate, if the operation's hash covers it and the operation does not include it."""
        if not operation.is_delegated or operation.delegate is not None:
            return None
        sender = "0x" + operation.sender.hex()
        code = (
            abi.unhex(await self._internal_calls.call(self._network, "eth_getCode", sender, "latest", fresh=True))
            or b""
        )
        return user_operation.delegate_of(code)

    async def _submit(
        self, key: Key, policy: MethodPolicy, params: bytes, sent: SentOperation
    ) -> bytes | RpcError | Fault:
        named = "0x" + sent.hash.hex()
        try:
            result = await call_upstream(self._dispatcher, policy, params, client=key.account.id).result()
        except RpcError as exc:
            await self._note(self._store.mark_refused(sent, exc.error))
            return exc
        except Unavailable as fault:
            # No bundler accepts calls: the operation was not sent.
            return fault
        except Fault as fault:
            fault.details = {**(fault.details or {}), "user_operation_hash": named}
            return fault
        except Exception:
            log.exception(
                "sending an operation failed unexpectedly", extra={"network": self._network.id, "hash": named}
            )
            return InternalError(
                "internal error; the operation may have been sent", details={"user_operation_hash": named}
            )
        if result.strip(b'"').lower() != named.encode():
            log.warning("a bundler replied with another hash", extra={"network": self._network.id, "hash": named})
            return InternalError(
                f"the bundler of {self._network.id} replied with something other than the operation's hash; "
                "it may have accepted the operation",
                details={"user_operation_hash": named},
                reason="upstream",
            )
        await self._note(self._store.mark_sent(sent))
        return b'"%b"' % named.encode()

    async def _note(self, writing: Any) -> None:
        """Record the outcome. If that fails, the caller is answered all the same: the operation is on record, and the follower
        adds what the chain shows."""
        try:
            await writing
        except Exception as exc:
            extra = {"network": self._network.id, "why": type(exc).__name__}
            log.warning("recording the outcome of an operation failed", extra=extra)


def _params(params: bytes) -> list[msgspec.Raw]:
    try:
        return _items(params)
    except _UNREADABLE:
        raise BadOperation("params: must be an array") from None


def _decoded(item: msgspec.Raw) -> Any:
    try:
        return parse_bounded(bytes(item))
    except RefusedJson as exc:
        raise BadOperation(f"params: {exc}") from None
