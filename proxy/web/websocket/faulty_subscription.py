"""Subscriptions of a socket with a fault plan (`core/fault_plans.py`): events come late or again, or the socket is dropped."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from proxy.core.fault_plans import FaultPlan
from proxy.services.feed.dispatch import as_removed
from proxy.services.feed.topics import FeedEvent
from proxy.services.rpc.flights import Caller
from proxy.web.websocket.socket_context import EventKind
from proxy.web.websocket.subscription_request import SubscriptionRequest
from proxy.web.websocket.subscriptions import Subscription, Subscriptions

# Bounds memory: events of one subscription that wait for their delay, or that a reorganisation would send again.
MOST_HELD = 1000
# Memory of events that wait for their delay, besides their bytes: a timer and its place in the queue.
DELAY_BYTES = 400
_REMOVED = b'"removed":true'


class SocketFault:
    """The plan of one socket, which its subscriptions share."""

    __slots__ = ("events_left", "plan")

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        # How many more events are sent before the socket is dropped; None if it is not.
        self.events_left = plan.drop or None

    def __repr__(self) -> str:
        return f"<SocketFault {self.plan}>"

    def subscription(
        self, owner: Subscriptions, request: SubscriptionRequest, *, id_: bytes, kind: EventKind, caller: Caller
    ) -> Subscription:
        """A new subscription, faulty by chance where the plan says so."""
        if random.random() < self.plan.p:
            return FaultySubscription(self, owner, request, id_=id_, kind=kind, caller=caller)
        return Subscription(owner, request, id_=id_, kind=kind, caller=caller)


class FaultySubscription(Subscription):
    __slots__ = ("_delayed", "_fault", "_later", "_recent")

    def __init__(
        self,
        fault: SocketFault,
        owner: Subscriptions,
        request: SubscriptionRequest,
        *,
        id_: bytes,
        kind: EventKind,
        caller: Caller,
    ) -> None:
        super().__init__(owner, request, id_=id_, kind=kind, caller=caller)
        self._fault = fault
        self._later: Callable[..., object] = owner.call_later
        # Events that wait for their delay, with the bytes that are counted for the account.
        self._delayed: deque[tuple[Sequence[FeedEvent], int]] = deque()
        # The events of the last blocks, by block.
        self._recent: dict[int, list[FeedEvent]] = {}

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        """Events of a replay are not delayed, but count towards a drop."""
        delay_ms = self._fault.plan.delay_ms
        if self.early is not None:
            self._defer(events)
        elif not delay_ms or self.replays:
            self._send(events)
        else:
            self._delay(events, delay_ms / 1000)

    def _delay(self, events: Sequence[FeedEvent], delay_s: float) -> None:
        size = DELAY_BYTES + sum(len(event.result) for event in events)
        if len(self._delayed) >= MOST_HELD or not self._owner.memory.take(self.account, size):
            self._owner.on_slow()
            return
        self._delayed.append((events, size))
        self._later(delay_s, self._send_delayed)

    def _send_delayed(self) -> None:
        events, size = self._delayed.popleft()
        self._owner.memory.give_back(self.account, size)
        if self.is_open:
            self._send(events)

    def _send(self, events: Sequence[FeedEvent]) -> None:
        self._pass_on(events)
        if self._fault.plan.reorg and not self.replays and self.topic.kind in ("logs", "newHeads"):
            for event in self._taken_back(events):
                self._pass_on([event])

    def _taken_back(self, events: Sequence[FeedEvent]) -> list[FeedEvent]:
        """The events of a reorganisation, if enough blocks have come since the last one."""
        recent = self._recent
        for event in events:
            recent.setdefault(event.block, []).append(event)
        held = [event for block in recent.values() for event in block]
        is_real = self.topic.kind == "logs" and any(_REMOVED in event.result for event in events)
        if is_real or len(held) > MOST_HELD:
            recent.clear()
        if len(recent) < self._fault.plan.reorg:
            return []
        recent.clear()
        removed = map(as_removed, reversed(held)) if self.topic.kind == "logs" else ()
        return [*removed, *held]

    def _pass_on(self, events: Sequence[FeedEvent]) -> None:
        left = self._fault.events_left
        if left is None:
            super().on_events(events)
        elif self.is_open and left > 0:
            self._fault.events_left = left - len(events[:left])
            super().on_events(events[:left])
            if len(events) >= left:
                self._output.drop()
