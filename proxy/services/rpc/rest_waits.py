"""Calls that wait for upstreams that limit our rate, or for the end of a trial, if no other upstream takes them.

They are sent when the upstreams take calls again, at the rate that these allow (`core/upstream_health.py`, *Rate limits*), one
of each account in turn. While an upstream that was out of use is tried with one call, the others wait a moment for its end. A
call that has waited for too long, or whose account has too many waiting calls, is refused with a 503.
"""

from __future__ import annotations

import asyncio
import time

from proxy.core.fair_permits import FairPermits
from proxy.core.round_robin import RoundRobin
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight

# How long a call waits, and the part of its time after which it waits no longer: it has to be answered too.
WAIT_S, WAIT_PART = 5.0, 0.5
# How long it waits at most for the end of a trial.
TRIAL_S = 0.5
# How often the upstreams are looked at while calls wait.
CHECK_S = 0.02
# Calls that wait on one network in this worker, in all and of one account.
MOST_WAITING = 4096
MOST_OF_ACCOUNT = 512


class RestWaits:
    """The waiting calls of one network."""

    def __init__(self) -> None:
        # By account: each call, and when it gives up.
        self._waiting: RoundRobin[tuple[Dispatcher, Flight, float]] = RoundRobin()
        self._permits = FairPermits(MOST_WAITING, per_client=MOST_OF_ACCOUNT)
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<RestWaits {len(self._permits)}>"

    def take(self, dispatcher: Dispatcher, flight: Flight) -> bool:
        """Let the flight wait. Returns False if that would not help."""
        now = time.monotonic()
        until = flight.began + min(WAIT_S, WAIT_PART * dispatcher.call_timeout_s)
        method = flight.policy.method.name
        members = [each for each in dispatcher.state.group.members if each.may_serve(method)]
        if not any(each.is_limited(method, now) for each in members):
            is_tried = any(each.is_tried(now) for each in members)
            until = min(until, flight.began + TRIAL_S) if is_tried else now
        if now >= until or not self._permits.take(flight.client):
            return False
        self._waiting.add(flight.client, (dispatcher, flight, until))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._release)
        return True

    def _release(self) -> None:
        """Send as many calls as the upstreams take, and refuse those that have waited for too long."""
        self._timer = None
        now = time.monotonic()
        for client in [*self._waiting]:
            while (first := self._waiting.first_of(client)) and (first[1].done or first[2] <= now):
                dispatcher, flight = self._pop(client)
                if not flight.done:
                    dispatcher.refuse(flight)
        full: set[str] = set()
        while self._send_round(now, full):
            pass
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._release)

    def _send_round(self, now: float, full: set[str]) -> bool:
        """Send one call of each account, unless no upstream takes calls of its method: those are added to `full`. Returns
        whether one was sent."""
        has_sent = False
        for client in [*self._waiting]:
            first = self._waiting.first_of(client)
            if first is None or first[1].policy.method.name in full:
                continue
            dispatcher, flight, _ = first
            upstream = None if flight.done else dispatcher.choose(flight.call, now, flight.call.excluded)
            if upstream is None and not flight.done:
                full.add(flight.policy.method.name)
                continue
            self._pop(client)
            if upstream is not None:
                flight.start_over()
                dispatcher.send(flight, upstream, now)
                has_sent = True
        return has_sent

    def _pop(self, client: str) -> tuple[Dispatcher, Flight]:
        dispatcher, flight, _ = self._waiting.pop(client)
        self._permits.give_back(client)
        return dispatcher, flight
