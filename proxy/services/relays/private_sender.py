"""Transactions that must not reach the public mempool: they are sent to the network's relays and nowhere else.

A transaction is private if its request has `X-Private: 1`, if its key sends private transactions only, or if its method is one
of relays (`eth_sendPrivateTransaction`). It is recorded before it is sent, and goes to all relays of the network at once. The
first that accepts it answers the caller. If none can be reached, the caller gets a 503, and nothing was sent. Each relay is one
call, which is paid for.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from proxy.chains.evm import transactions
from proxy.chains.registry import Network
from proxy.core import jsonrpc
from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.errors import DeadlinePassed, Fault, InternalError, InvalidRequest, NotSent, Unavailable
from proxy.services.accounts.metering import meter_of_task
from proxy.services.rpc.broadcasts import Broadcast
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import Call, Caller, all_but
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.networks import Networks, Route
from proxy.services.rpc.own_methods import OwnMethods
from proxy.store.postgres.private_transactions import PrivateTransaction, PrivateTransactionStore
from proxy.wire.upstream import Upstream

SEND, SEND_PRIVATE, SEND_PRIVATE_RAW = (
    "eth_sendRawTransaction",
    "eth_sendPrivateTransaction",
    "eth_sendPrivateRawTransaction",
)
CANCEL = "eth_cancelPrivateTransaction"
SENDING = frozenset((SEND, SEND_PRIVATE, SEND_PRIVATE_RAW))
# The params of relays' own methods have few members. Nodes accept no larger transaction (geth: 128 KiB), with blobs 1 MiB.
MOST_PARAMS = 2_200_000
MOST_PREFERENCES = 4_096
_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)
_HEX = re.compile(r"0x(?:[0-9a-fA-F]{2})+", re.ASCII)
_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,16}", re.ASCII)
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
T = TypeVar("T")
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A transaction as its sender gave it, and what relays of Flashbots' style may get with it."""

    raw: str
    hash: bytes
    max_block: str = ""
    preferences: bytes = b""

    def params(self, method: str) -> bytes:
        """The params of a relay's method, rebuilt from the parsed members."""
        raw = msgspec.json.encode(self.raw)
        if method == SEND:
            return b"[%b]" % raw
        members = [b'"tx":%b' % raw]
        if self.max_block:
            members.append(b'"maxBlockNumber":"%b"' % self.max_block.encode())
        if self.preferences:
            members.append(b'"preferences":%b' % self.preferences)
        return b"[{%b}]" % b",".join(members)


class _RelayBroadcast(Broadcast):
    """Also notes whether a relay may have the transaction although none has confirmed it."""

    __slots__ = ("may_be_sent",)

    def __init__(self, caller: Caller) -> None:
        super().__init__(caller)
        self.may_be_sent = False

    def on_fault(self, fault: Fault) -> None:
        if not isinstance(fault, NotSent | Unavailable):
            self.may_be_sent = True
        super().on_fault(fault)


class _Sending:
    """One transaction on its way to relays. `after`: the number of blocks after which it becomes public; 0 for never."""

    __slots__ = ("after", "given", "has_begun", "key", "sent")

    def __init__(self, sent: PrivateTransaction, given: SignedTransaction, key: Key, after: int) -> None:
        self.sent = sent
        self.given = given
        self.key = key
        self.after = after
        self.has_begun = False

    def __repr__(self) -> str:
        return f"<_Sending {self.sent.name}, {'begun' if self.has_begun else 'not begun'}>"

    def begin(self) -> None:
        """From now on relays may have it."""
        self.has_begun = True


class PrivateTransactions:
    def __init__(
        self, relays: Networks, store: PrivateTransactionStore, own: OwnMethods, *, flashbots: frozenset[str]
    ) -> None:
        """`flashbots`: the labels of relays that take eth_sendPrivateTransaction."""
        self._relays = relays
        self._store = store
        self._own = own
        self._flashbots = flashbots

    def __repr__(self) -> str:
        return f"<PrivateTransactions {self._relays!r}>"

    def takes(self, policy: MethodPolicy, route: Route, key: Key, directives: Directives | None) -> bool:
        """Whether a write must not be sent to the upstreams. A bundler's operations are no transactions: the setting of a key
        does not refer to them."""
        if directives is not None and directives.private:
            return True
        if route.guard is not None:
            return False
        return key.private_transactions or (policy.method.private and self._relays.find(route.network) is not None)

    def start(
        self, call: tuple[Caller, MethodPolicy, bytes], route: Route, *, key: Key, directives: Directives | None
    ) -> None:
        """Answer the caller later, or at once if the call cannot be private."""
        caller, policy, params = call
        name, relays = policy.method.name, self._relays.find(route.network)
        if route.guard is not None or name not in (*SENDING, CANCEL):
            words = f"{name} cannot be sent to private relays, so it was not sent: use eth_sendRawTransaction"
            caller.on_fault(InvalidRequest(words, param="X-Private"))
            return
        if relays is None:
            words = f"{route.network.id} has no private relay, so the transaction was not sent"
            remedy = "an operator adds one under [[relays]]"
            caller.on_fault(InvalidRequest(f"{words}: {remedy}", param="X-Private"))
            return
        try:
            if name == CANCEL:
                cancelled = PrivateTransaction(route.network.id, _hash_in(params), key.account.id)
                self._own.answer(
                    call, route, lambda: self._cancel(cancelled, relays, policy), key=key, directives=directives
                )
                return
            given = transaction_in(name, params)
        except InvalidRequest as exc:
            caller.on_error(jsonrpc.error(jsonrpc.INVALID_PARAMS, exc.message))
            return
        sent = PrivateTransaction(route.network.id, given.hash, key.account.id)
        sending = _Sending(sent, given, key, 0 if directives is None else directives.private_fallback)
        self._own.answer(
            call,
            route,
            lambda: self._send(sending, relays, route, policy),
            key=key,
            directives=directives,
            late=lambda fault: _perhaps(fault, sent, route.network) if sending.has_begun else fault,
        )

    # Sending

    async def _send(self, sending: _Sending, relays: Route, route: Route, policy: MethodPolicy) -> bytes:
        given, sent, after = sending.given, sending.sent, sending.after
        await _pay(policy, len(relays.upstreams))
        public_after = _public_after(route, after) if after else None
        await self._store.record(
            sent,
            key_id=sending.key.id,
            raw=bytes.fromhex(given.raw.removeprefix("0x")) if after else None,
            public_after=public_after,
        )
        await _announce(route.state, sent)
        reply = PendingReply()
        broadcast = _RelayBroadcast(reply)
        calls = [(self._call(relays, each, given, sending.key), each) for each in relays.upstreams]
        sending.begin()
        broadcast.send_to(relays.dispatcher, calls, time.monotonic())
        try:
            await reply.result()
        except (RpcError, Fault) as exc:
            if broadcast.may_be_sent:
                raise _perhaps(exc, sent, route.network) from None
            await self._store.mark_refused(sent)
            raise exc if isinstance(exc, RpcError) else _nowhere(exc, route.network) from None
        await self._store.mark_accepted(sent)
        return b'"%b"' % sent.name.encode()

    def _call(self, relays: Route, upstream: Upstream, given: SignedTransaction, key: Key) -> Call:
        method = SEND_PRIVATE if upstream.label in self._flashbots else SEND
        return Call(relays.policies[method], given.params(method), client=key.account.id, excluded=all_but(upstream))

    # Cancelling

    async def _cancel(self, sent: PrivateTransaction, relays: Route, policy: MethodPolicy) -> bytes:
        """It never becomes public from now on. Relays of Flashbots' style drop it; no other relay can."""
        takers = [each for each in relays.upstreams if each.label in self._flashbots]
        await _pay(policy, len(takers))
        if not await self._store.cancel(sent):
            raise InvalidRequest(f"no private transaction {sent.name} of this account waits to be mined")
        if not takers:
            return b"false"
        reply, params = PendingReply(), b'[{"txHash":"%b"}]' % sent.name.encode()
        calls = [
            (Call(relays.policies[CANCEL], params, client=sent.account, excluded=all_but(each)), each)
            for each in takers
        ]
        Broadcast(reply).send_to(relays.dispatcher, calls, time.monotonic())
        return b"true" if await reply.result() == b"true" else b"false"


async def _announce(state: NetworkState, sent: PrivateTransaction) -> None:
    """Let every worker and host find the transaction when its sender asks for it."""
    if state.writes is None:
        return
    note = state.writes.took_privately(sent.account, sent.hash)
    if state.exchange is not None:
        published = asyncio.Event()
        state.exchange.wrote(state.network_id, note, published.set)
        await published.wait()


async def _pay(policy: MethodPolicy, calls: int) -> None:
    meter = meter_of_task.get()
    if meter is not None:
        await meter.pay(policy.units * calls)


def _public_after(route: Route, blocks: int) -> int:
    if not route.heads.tip:
        raise Unavailable(f"the newest block of {route.network.id} is not known yet, so the transaction was not sent")
    return route.heads.tip + blocks


def _perhaps(exc: RpcError | Fault, sent: PrivateTransaction, network: Network) -> Fault:
    words = (
        f"a relay of {network.id} may have accepted the transaction: look it up by its hash before you send it again"
    )
    details = {"transaction_hash": sent.name}
    if isinstance(exc, DeadlinePassed):
        return DeadlinePassed(words, details=details)
    return InternalError(words, details=details, reason="upstream")


def _nowhere(fault: Fault, network: Network) -> Unavailable:
    return Unavailable(
        f"no relay of {network.id} can be reached, so the transaction was not sent anywhere: {fault.message}",
        reason="upstream",
    )


# Params


def transaction_in(method: str, params: bytes) -> SignedTransaction:
    """Parse the params of a method that sends a transaction. Raises InvalidRequest with the reason."""
    items = _read(_items, params, "params: must be an array") if len(params) <= MOST_PARAMS else []
    if not 1 <= len(items) <= (2 if method == SEND_PRIVATE_RAW else 1):
        raise InvalidRequest(f"params: must be an array with the transaction, of at most {MOST_PARAMS} bytes")
    if method != SEND_PRIVATE:
        given = SignedTransaction(_raw(items[0]), b"", preferences=_preferences(items[1:]))
    else:
        members = _read(_members, bytes(items[0]), "params.0: must be an object with the member tx")
        if unknown := sorted(members.keys() - {"tx", "maxBlockNumber", "preferences"}):
            raise InvalidRequest(
                f"params.0.{unknown[0]}: there is no such member; there are tx, maxBlockNumber, preferences"
            )
        if "tx" not in members:
            raise InvalidRequest("params.0.tx: is required")
        preferences = [members["preferences"]] if "preferences" in members else []
        given = SignedTransaction(
            _raw(members["tx"]), b"", _block(members.get("maxBlockNumber")), _preferences(preferences)
        )
    named = transactions.hash_of_sent(given.params(SEND))
    if named is None:
        raise InvalidRequest("params.0: is not a signed transaction")
    return replace(given, hash=bytes.fromhex(named[3:-1].decode()))


def _hash_in(params: bytes) -> bytes:
    """The hash in the params of a cancellation: `[{"txHash": …}]`."""
    items = _read(_items, params, "params: must be an array")
    members = _read(_members, bytes(items[0]), "params.0: must be an object") if len(items) == 1 else {}
    text = _read(_text, bytes(members.get("txHash", b'""')), "params.0.txHash: must be a hash")
    if not _HASH.fullmatch(text):
        raise InvalidRequest("params.0.txHash: must be a hash: 0x and 64 hex digits")
    return bytes.fromhex(text[2:])


def _raw(item: msgspec.Raw) -> str:
    text = _read(_text, bytes(item), "params.0: the transaction must be hex text")
    if not _HEX.fullmatch(text):
        raise InvalidRequest("params.0: the transaction must be 0x and an even number of hex digits")
    return text


def _block(item: msgspec.Raw | None) -> str:
    text = (
        "" if item is None else _read(_text, bytes(item), "params.0.maxBlockNumber: must be a block number as hex text")
    )
    if text and not _QUANTITY.fullmatch(text):
        raise InvalidRequest("params.0.maxBlockNumber: must be a block number such as 0x1406f40")
    return text


def _preferences(items: Sequence[msgspec.Raw]) -> bytes:
    preferences = bytes(items[0]) if items else b""
    if preferences and (preferences[:1] != b"{" or len(preferences) > MOST_PREFERENCES):
        raise InvalidRequest(f"preferences: must be an object of at most {MOST_PREFERENCES} bytes")
    return preferences


def _read(decode: Callable[[bytes], T], given: bytes, wrong: str) -> T:
    try:
        return decode(given)
    except _UNREADABLE:
        raise InvalidRequest(wrong) from None
