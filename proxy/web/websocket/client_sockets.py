"""All WebSockets and event streams of a worker: opening, limits per account, pings, key changes, and the drain.

Pings are sent to a share of the sockets at a time, so that they are spread over the interval. When a key is revoked or expires,
its sockets are closed; a key that was only changed keeps them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

from proxy import telemetry
from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.errors import Unavailable
from proxy.services.rpc.method_policy import ANY_SCOPE
from proxy.web.front.handler_connection import HandlerConnection
from proxy.web.websocket.client_socket import ClientSocket
from proxy.web.websocket.frames import POLICY, RESTART
from proxy.web.websocket.socket_context import SocketContext, SocketTerms
from proxy.web.websocket.unit_allowance import UnitAllowance

TICK_S = 0.5


class KeySource(Protocol):
    """Finds the new version of a key that was changed."""

    on_removed: list[Callable[[Key], None]]

    def successor(self, key: Key) -> Key | None: ...


class OpenSocket(Protocol):
    """A WebSocket or an event stream. Both count as sockets of their account."""

    @property
    def key(self) -> Key: ...

    @property
    def network(self) -> Network: ...

    @property
    def is_open(self) -> bool: ...

    def use_key(self, successor: Key) -> None:
        """The key was changed."""

    def ping(self) -> None: ...

    def close(self, code: int, reason: str) -> None: ...

    def close_after_replies(self, code: int, reason: str) -> None: ...


class ClientSockets:
    def __init__(self, context: SocketContext, keys: KeySource) -> None:
        self.context = context
        self._keys = keys
        self._by_key: dict[str, dict[OpenSocket, None]] = {}
        self._allowances: dict[str, UnitAllowance] = {}
        self._count = 0
        # Sockets that are not pinged yet in this round, and when the next round starts.
        self._round: list[OpenSocket] = []
        self._next_round = context.now() + context.limits.ping_s
        # By kind, as last written to the metrics: open subscriptions (none were written yet), sent and dropped events.
        self._published = dict.fromkeys(context.kinds, (-1, 0, 0))
        keys.on_removed.append(self._on_key_removed)

    def __repr__(self) -> str:
        return f"<ClientSockets {self._count} open of {len(self._by_key)} keys>"

    def __len__(self) -> int:
        return self._count

    # Opening

    async def admit(self, key: Key) -> None:
        """Count a socket that is about to open, or raise why this key may not open another one."""
        if self.context.limiter.draining:
            raise Unavailable("this worker is about to stop: connect again")
        await self.context.caps.add_socket(key)
        if not key.alive:
            self.context.caps.remove_socket(key)
            raise Unavailable("the API key has changed: connect again")

    def open(self, handler: HandlerConnection, terms: SocketTerms, *, reply: bytes) -> ClientSocket | None:
        """Turn an HTTP connection into the socket that was admitted, after the handshake's reply. None if the client has left
        meanwhile."""
        transport, address, ahead = handler.release()
        key = terms.key
        if transport is None:
            self.context.caps.remove_socket(key)
            return None
        socket = ClientSocket(
            self.context,
            transport,
            self.allowance_of(key),
            terms,
            address=address,
            on_lost=self._on_lost,
        )
        self.add(socket)
        self.context.limiter.replace(handler, socket)
        transport.write(reply)
        transport.set_protocol(socket)
        if ahead:
            socket.data_received(ahead)
        return socket

    def _on_lost(self, socket: ClientSocket, address: str) -> None:
        self.context.limiter.remove(socket, address)
        self.remove(socket)

    def add(self, socket: OpenSocket) -> None:
        """A socket that was admitted is open."""
        self._by_key.setdefault(socket.key.id, {})[socket] = None
        self._count += 1

    def remove(self, socket: OpenSocket) -> None:
        of_key = self._by_key.get(socket.key.id)
        if of_key is None or socket not in of_key:
            return
        del of_key[socket]
        self._count -= 1
        self.context.caps.remove_socket(socket.key)
        if not of_key:
            del self._by_key[socket.key.id]
            self._allowances.pop(socket.key.id).close()

    def allowance_of(self, key: Key) -> UnitAllowance:
        allowance = self._allowances.get(key.id)
        if allowance is None:
            allowance = self._allowances[key.id] = UnitAllowance(self.context.admission, key)
        return allowance

    # Changes of keys

    def _on_key_removed(self, key: Key) -> None:
        """Look for the key's successor in the next turn: it is loaded after the removal."""
        if key.id in self._by_key:
            self.context.loop.call_soon(self._follow_key, key)

    def _follow_key(self, key: Key) -> None:
        successor = self._keys.successor(key)
        for socket in [*self._by_key.get(key.id, ())]:
            if socket.key.alive:
                continue
            if successor is None:
                socket.close(POLICY, "the API key was revoked")
            elif fault := self.context.admission.authorize(successor, ANY_SCOPE, socket.network):
                socket.close(POLICY, fault.message)
            elif successor.restrictions is not None and successor.restrictions != key.restrictions:
                socket.close(POLICY, "the API key's restrictions have changed: connect again")
            else:
                self._allowances[key.id].key = successor
                socket.use_key(successor)

    def _close_expired(self) -> None:
        now = time.monotonic()
        for of_key in [*self._by_key.values()]:
            for socket in [*of_key] if next(iter(of_key)).key.expires_at <= now else ():
                socket.close(POLICY, "the API key has expired")

    # Pings and metrics

    async def watch(self) -> None:
        """A supervised loop: pings, expired keys, metrics."""
        while True:
            self._close_expired()
            self._ping_slice()
            self._publish()
            await asyncio.sleep(TICK_S)

    def _ping_slice(self) -> None:
        """Ping a share of the sockets, so that each gets one ping per `ping_s`."""
        context = self.context
        if not self._round and context.now() >= self._next_round:
            self._next_round = context.now() + context.limits.ping_s
            self._round = [socket for of_key in self._by_key.values() for socket in of_key]
        share = max(1, math.ceil(self._count * TICK_S / context.limits.ping_s))
        for socket in self._round[-share:]:
            if socket.is_open:
                socket.ping()
        del self._round[-share:]

    def _publish(self) -> None:
        telemetry.sockets_open.set(self._count)
        for name, kind in self.context.kinds.items():
            counts = (kind.open, kind.sent, kind.dropped)
            if counts == self._published[name]:
                continue
            _, sent, dropped = self._published[name]
            self._published[name] = counts
            telemetry.subscriptions_open.labels(name).set(kind.open)
            telemetry.socket_events_total.labels(name, "sent").inc(kind.sent - sent)
            telemetry.socket_events_total.labels(name, "dropped").inc(kind.dropped - dropped)

    # The drain

    def drain(self) -> None:
        """Close all sockets, each after its calls under way are answered."""
        for of_key in [*self._by_key.values()]:
            for socket in [*of_key]:
                socket.close_after_replies(RESTART, "service restart: reconnect, and subscribe with fromBlock")
