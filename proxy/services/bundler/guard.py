"""Operations on their way to a bundler: read field by field, written down, sent once.

What goes out is put together anew from the fields that were read, so a bundler never sees a member that we did not. An
operation is recorded, under the hash that the EntryPoint will give it, before it leaves: whatever happens then, nobody's
operation is forgotten. Its bundler's answer must be that hash; anything else may be an operation that was taken, and is told
as a fault that names the hash.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from proxy.chains.evm import abi, user_operation
from proxy.chains.evm.bundler_methods import SEND
from proxy.chains.evm.user_operation import BadOperation, UserOperation
from proxy.chains.registry import Network
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.errors import Fault, InternalError, Unavailable
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.networks import Route
from proxy.store.operations import OperationStore, SentOperation
from proxy.tasks import Tasks

log = logging.getLogger("penstock.bundler")

_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, orjson.JSONDecodeError, RecursionError, UnicodeDecodeError)
_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class BundlerParams:
    """The params of a call, read."""

    operation: UserOperation
    fields: Mapping[str, Any]
    entry_point: str
    overrides: bytes

    def params(self) -> bytes:
        """The same as JSON of our own making."""
        parts = [orjson.dumps(self.fields), orjson.dumps(self.entry_point)]
        return b"[%b]" % b",".join((*parts, self.overrides) if self.overrides else parts)


class BundlerGuard:
    """Before the bundlers of one network."""

    def __init__(self, route: Route, store: OperationStore, internal_calls: InternalCalls, tasks: Tasks) -> None:
        self._route = route
        self._network: Network = route.network
        self._store = store
        self._internal_calls = internal_calls
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<BundlerGuard of {self._network.id}>"

    def read(self, policy: MethodPolicy, params: bytes) -> BundlerParams:
        """BadOperation names what is wrong."""
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
        return BundlerParams(
            user_operation.parse(fields, version, draft=not sends), _without_nulls(fields), entry_point, overrides
        )

    def fault_of(self, policy: MethodPolicy, params: bytes) -> bytes | None:
        try:
            self.read(policy, params)
        except BadOperation as exc:
            return jsonrpc.error(jsonrpc.INVALID_PARAMS, str(exc))
        return None

    def flight(self, caller: Any, key: Key, policy: MethodPolicy, params: bytes, now: float) -> Flight | None:
        """An estimate is a read like others. A send waits for its record, and is answered when it ends."""
        given = self.read(policy, params)
        if policy.method.name != SEND:
            flight = caller.flight = Flight(self._route, policy, given.params(), caller, now)
            return flight
        self._tasks.start(f"send {next(_serial)}", lambda: self._send(caller, key, policy, given))
        return None

    # Sending

    async def _send(self, caller: Any, key: Key, policy: MethodPolicy, given: BundlerParams) -> None:
        """Whatever happens, the asker is told once, and nothing is sent twice: no exception leaves this."""
        try:
            outcome = await self._outcome(key, policy, given)
        except Fault as fault:
            outcome = fault
        except Exception:
            log.exception("an operation could not be sent", extra={"network": self._network.id})
            outcome = InternalError("internal error; the operation was not sent")
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
        return await self._ask(policy, params, sent)

    def _newest_block(self) -> int | None:
        return (self._route.beside.heads.tip or None) if self._route.beside is not None else None

    async def _delegate(self, operation: UserOperation) -> bytes | None:
        """What the sender delegates to already, where the operation's hash covers it and the operation does not say it."""
        if not operation.is_delegated or operation.delegate is not None:
            return None
        sender = "0x" + operation.sender.hex()
        code = (
            abi.unhex(await self._internal_calls.call(self._network, "eth_getCode", sender, "latest", fresh=True))
            or b""
        )
        return user_operation.delegate_of(code)

    async def _ask(self, policy: MethodPolicy, params: bytes, sent: SentOperation) -> bytes | RpcError | Fault:
        named = "0x" + sent.hash.hex()
        try:
            result = await self._launch(policy, params).result()
        except RpcError as exc:
            await self._note(self._store.mark_refused(sent, exc.error))
            return exc
        except Unavailable as fault:
            # Nobody took calls: it has not left us.
            return fault
        except Fault as fault:
            fault.details = {**(fault.details or {}), "user_operation_hash": named}
            return fault
        except Exception:
            log.exception("an operation's sending ended oddly", extra={"network": self._network.id, "hash": named})
            return InternalError(
                "internal error; the operation was perhaps sent", details={"user_operation_hash": named}
            )
        if result.strip(b'"').lower() != named.encode():
            log.warning("a bundler answered with another hash", extra={"network": self._network.id, "hash": named})
            return InternalError(
                f"the bundler of {self._network.id} answered with something that is not the operation's hash; "
                "it may have taken the operation",
                details={"user_operation_hash": named},
            )
        await self._note(self._store.mark_sent(sent))
        return b'"%b"' % named.encode()

    def _launch(self, policy: MethodPolicy, params: bytes) -> PendingReply:
        pending = PendingReply()
        now = time.monotonic()
        pending.flight = flight = Flight(self._route, policy, params, pending, now)
        self._route.launch(flight, now)
        return pending

    async def _note(self, writing: Any) -> None:
        """How it went. Whatever the database says, the caller is told; the record is there, and the chain tells the rest."""
        try:
            await writing
        except Exception as exc:
            extra = {"network": self._network.id, "why": type(exc).__name__}
            log.warning("an operation's outcome could not be recorded", extra=extra)


def _params(params: bytes) -> list[msgspec.Raw]:
    try:
        return _items(params)
    except _UNREADABLE:
        raise BadOperation("params: must be an array") from None


def _decoded(item: msgspec.Raw) -> Any:
    try:
        return orjson.loads(bytes(item))
    except _UNREADABLE:
        raise BadOperation("params: are not valid JSON") from None


def _without_nulls(fields: Any) -> Mapping[str, Any]:
    """A member that is null is one that is not there."""
    return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else {}
