"""All WebSockets of a worker: who has how many, what leaves in a turn, who is still there, and how they end.

A message for many sockets is written to a slice of them in each turn of the loop, so that calls are answered in between. Pings
go round in slices too. A key that no longer holds takes its sockets with it; one that was only changed keeps them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from proxy import telemetry
from proxy.core.access import Key
from proxy.errors import Fault, RateLimited, Unavailable
from proxy.services.accounts.admission import Admission
from proxy.services.feed.topics import Feeds
from proxy.services.rpc.calls import Rpc
from proxy.services.rpc.method_policy import ANY_SCOPE
from proxy.services.rpc.networks import Route
from proxy.settings import Plan
from proxy.settings import SocketSettings as Limits
from proxy.tasks import Tasks
from proxy.telemetry import AccessLines
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.websocket.client_socket import ClientSocket
from proxy.web.websocket.frames import POLICY, RESTART
from proxy.web.websocket.subscriptions import kinds_of
from proxy.web.websocket.unit_allowance import UnitAllowance

if TYPE_CHECKING:
    from proxy.web.front.connection_limiter import HandlerConnection

# Sockets that are written to in one turn. While calls come in between, they wait for a tenth of a millisecond; while none
# does, twice as many each time, since every turn costs as much as half a message.
FEW, MANY = 16, 128
# What lies between two turns in which nobody else had anything to do.
NOTHING_S = 15e-6
TICK_S = 0.5
_monotonic = time.monotonic
_LINE = (
    b'{"time":"%b","level":"info","logger":"penstock.access","message":"message","request_id":"%b","network":"%b",'
    b'"method":"%b","outcome":"%b","ms":%.3f,"key":"%b","units":%d}\n'
)


class KeySource(Protocol):
    """Where a key that was changed is found again."""

    on_removed: list[Callable[[Key], None]]

    def successor(self, key: Key) -> Key | None: ...


class ClientSockets:
    def __init__(
        self,
        limits: Limits,
        *,
        limiter: ConnectionLimiter,
        admission: Admission,
        keys: KeySource,
        rpc: Rpc,
        feeds: Feeds,
        plans: Mapping[str, Plan],
        prices: Mapping[str, int],
        tasks: Tasks,
        access: AccessLines | None,
    ) -> None:
        self.limits = limits
        self.admission = admission
        self.rpc = rpc
        self.feeds = feeds
        self.kinds = kinds_of(prices)
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.message_timeout_s = limiter.limits.body_timeout_s
        # Rounds of pings that may pass without a word from the client.
        self.silent_rounds = max(1, round(limits.idle_s / limits.ping_s))
        self._limiter = limiter
        self._keys = keys
        self._plans = plans
        self._tasks = tasks
        self._access = access
        self._serial = itertools.count(1)
        self._by_key: dict[str, dict[ClientSocket, None]] = {}
        self._purses: dict[str, UnitAllowance] = {}
        # Subscriptions of each key, over all its sockets.
        self._subscribed: Counter[str] = Counter()
        self._count = 0
        # Those that have something to send.
        self.dirty: list[ClientSocket] = []
        # How many of them have been written to, how many are next, and when the last were done.
        self._written = 0
        self._slice = FEW
        self._paused_at = 0.0
        # Those that are not pinged yet in this round, and when the next may begin.
        self._round: list[ClientSocket] = []
        self._next_round = self.now() + limits.ping_s
        self._stamp = b""
        self._counted = dict.fromkeys(self.kinds, (0, 0))
        keys.on_removed.append(self._key_gone)

    def __repr__(self) -> str:
        return f"<ClientSockets {self._count} open of {len(self._by_key)} keys>"

    def __len__(self) -> int:
        return self._count

    # Coming and going

    def refusal(self, key: Key) -> Fault | None:
        """Why this key may not open one more."""
        if self._limiter.draining:
            return Unavailable("this worker is about to stop: connect again")
        most = self._plan(key).sockets
        if len(self._by_key.get(key.id, ())) >= most:
            return RateLimited(f"this key has its {most} sockets open: close one", retry_after_s=1)
        return None

    def open(
        self, handler: HandlerConnection, *, reply: bytes, route: Route, key: Key, request_id: str
    ) -> ClientSocket | None:
        """The connection changes hands: the reply is HTTP's last word on it. None where the client has left meanwhile."""
        transport, address, ahead = handler.release()
        if transport is None:
            return None
        socket = ClientSocket(self, transport, address=address, route=route, key=key, request_id=request_id)
        self._by_key.setdefault(key.id, {})[socket] = None
        self._count += 1
        self._limiter.replace(handler, socket)
        transport.write(reply)
        transport.set_protocol(socket)
        if ahead:
            socket.data_received(ahead)
        return socket

    def left(self, socket: ClientSocket, address: str) -> None:
        self._limiter.remove(socket, address)
        of_key = self._by_key.get(socket.key.id)
        if of_key is None or socket not in of_key:
            return
        del of_key[socket]
        self._count -= 1
        if not of_key:
            del self._by_key[socket.key.id]
            self._purses.pop(socket.key.id).close()

    def purse_of(self, key: Key) -> UnitAllowance:
        purse = self._purses.get(key.id)
        if purse is None:
            purse = self._purses[key.id] = UnitAllowance(self.admission, key)
        return purse

    def check_subscriptions(self, key: Key, on_socket: int) -> None:
        """RateLimited where one more would be one too many: on the socket, or over all of the key."""
        plan = self._plan(key)
        if on_socket >= plan.subscriptions:
            words = f"this socket has its {plan.subscriptions} subscriptions: end one or open another"
            raise RateLimited(words, retry_after_s=1)
        if self._subscribed[key.id] >= plan.subscriptions_per_key:
            words = f"this key has its {plan.subscriptions_per_key} subscriptions: end one"
            raise RateLimited(words, retry_after_s=1)

    def subscribed(self, key: Key, change: int) -> None:
        self._subscribed[key.id] += change
        if not self._subscribed[key.id]:
            del self._subscribed[key.id]

    def _plan(self, key: Key) -> Plan:
        """A plan that is no longer in the table counts as the smallest, as for the key's rates."""
        return self._plans.get(key.account.plan) or self._plans["free"]

    def closing(self, socket: ClientSocket, code: int) -> None:
        telemetry.sockets_closed_total.labels(str(code) if code < 3000 else "other").inc()

    # Keys that change

    def _key_gone(self, key: Key) -> None:
        """Its successor, if it has one, is known a moment later."""
        if key.id in self._by_key:
            self.loop.call_soon(self._follow_key, key)

    def _follow_key(self, key: Key) -> None:
        successor = self._keys.successor(key)
        for socket in [*self._by_key.get(key.id, ())]:
            if socket.key.alive:
                continue
            if successor is None:
                socket.close(POLICY, "the API key was revoked")
            elif fault := self.admission.may(successor, ANY_SCOPE, socket.route.network):
                socket.close(POLICY, fault.message)
            elif successor.fence is not None and successor.fence != key.fence:
                socket.close(POLICY, "the API key may be used from elsewhere now: connect again")
            else:
                socket.key = self._purses[key.id].key = successor

    def _close_expired(self) -> None:
        now = time.monotonic()
        for of_key in [*self._by_key.values()]:
            for socket in [*of_key] if next(iter(of_key)).key.dies_at <= now else ():
                socket.close(POLICY, "the API key has expired")

    # Writing

    def arm(self) -> None:
        """The first that has something to send asks for the end of the turn."""
        self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write to the next few. The list is walked through, not cut: copying the rest each time cost 1 µs a message."""
        is_alone = _monotonic() - self._paused_at < NOTHING_S
        self._slice = min(self._slice * 2, MANY) if is_alone else FEW
        dirty, start = self.dirty, self._written
        self._written = end = start + self._slice
        if end < len(dirty):
            self.loop.call_soon(self._flush)
        else:
            self.dirty, self._written = [], 0
        for socket in dirty[start:end]:
            data = socket.pending
            if type(data) is bytes and socket.is_straight:
                # The most common case, written out: one frame, to a client that takes it.
                socket.pending = None
                try:
                    taken = os.write(socket.fd, data)
                except OSError:
                    taken = 0
                if taken < len(data):
                    socket.write_later(data[taken:])
            else:
                socket.write_out()
        self._paused_at = _monotonic()

    def note(self, socket: ClientSocket, method: str, *, outcome: str, units: int, took_s: float) -> None:
        """A message's line in the access log."""
        if self._access is None:
            return
        self._access.add(
            _LINE
            % (
                self._stamp,
                socket.request_id.encode(),
                socket.route.network.id.encode(),
                method.encode(),
                outcome.encode(),
                took_s * 1000,
                socket.key.id.encode(),
                units,
            )
        )

    # Clocks: those of the few that wait for something are the door's

    def watch_clock(self, socket: ClientSocket) -> None:
        self._limiter.timed.add(socket)

    def stop_clock(self, socket: ClientSocket) -> None:
        self._limiter.timed.discard(socket)

    def watch_reader(self, socket: ClientSocket, now: float, stalled_since: float, unsent: int) -> tuple[float, int]:
        return self._limiter.watch_reader(socket, now, stalled_since, unsent)

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Something for one socket that has to wait."""
        self._tasks.start(f"subscription {next(self._serial)}", work)

    async def watch(self) -> None:
        """A supervised loop: pings, keys that expire, counts."""
        while True:
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()).encode()
            self._close_expired()
            self._ping_slice()
            self._publish()
            await asyncio.sleep(TICK_S)

    def _ping_slice(self) -> None:
        """Each of them once in every `ping_s`."""
        if not self._round and self.now() >= self._next_round:
            self._next_round = self.now() + self.limits.ping_s
            self._round = [socket for of_key in self._by_key.values() for socket in of_key]
        share = max(1, math.ceil(self._count * TICK_S / self.limits.ping_s))
        for socket in self._round[-share:]:
            if socket.is_open:
                socket.ping()
        del self._round[-share:]

    def _publish(self) -> None:
        telemetry.sockets_open.set(self._count)
        for name, kind in self.kinds.items():
            sent, dropped = self._counted[name]
            self._counted[name] = (kind.sent, kind.dropped)
            telemetry.subscriptions_open.labels(name).set(kind.open)
            telemetry.socket_events_total.labels(name, "sent").inc(kind.sent - sent)
            telemetry.socket_events_total.labels(name, "dropped").inc(kind.dropped - dropped)

    # The end

    def drain(self) -> None:
        """Everybody is asked to come back: whoever has calls under way, when they are answered."""
        for of_key in [*self._by_key.values()]:
            for socket in [*of_key]:
                socket.close_after_answers(RESTART, "service restart: connect again, and subscribe with fromBlock")
