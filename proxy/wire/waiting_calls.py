"""The calls that wait for a connection of one upstream, in a queue for each client.

The client that has the fewest calls in flight comes first, and among equals they take turns: many calls of one client delay its
own. The queue is bounded in time. A short burst may wait for PATIENCE_S. If calls have waited for longer than that without
a break, the upstream is overloaded and waiting cannot help: then a call waits no longer than the upstream takes to answer one
or two, so that the calls that are served are recent ones. (CoDel, RFC 8289, has the same two cases.) If clients that do not
read hold the connections, the upstream is not overloaded, and these clients soon lose the connections: calls wait for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from proxy.wire.upstream import ReplySink

# How long a call may wait for a connection.
PATIENCE_S: Final = 0.3
# How long under overload: this multiple of the upstream's latency, but at least LEAST_PATIENCE_S. With 1.5, calls that are
# served take less than three times as long as without overload.
OVERLOAD_PATIENCE: Final = 1.5
LEAST_PATIENCE_S: Final = 0.02
# How long while clients that do not read hold the connections.
READERS_PATIENCE_S: Final = 5.0
# Our own calls, which have no client that could repeat them, may wait longer.
OWN_PATIENCE_S: Final = 5.0


def patience_s(crowded_s: float, latency_s: float) -> float:
    """How long a call may wait. `crowded_s`: for how long calls have been waiting without a break. `latency_s`: 0.0 if it is
    unknown."""
    if crowded_s < PATIENCE_S or not latency_s:
        return PATIENCE_S
    return min(max(OVERLOAD_PATIENCE * latency_s, LEAST_PATIENCE_S), PATIENCE_S)


# In parts, so that large requests are not copied.
UpstreamRequest: TypeAlias = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class WaitingCall:
    sink: ReplySink
    request: UpstreamRequest
    client: str
    since: float
    # `once`: it must not be sent twice, so it needs a connection that was used lately. `fresh`: it needs a new connection.
    once: bool
    fresh: bool

    def pass_to(self, successor: ReplySink) -> None:
        self.sink = successor

    def is_too_old(self, now: float, patience_s: float) -> bool:
        return now - self.since > (patience_s if self.client else OWN_PATIENCE_S)


class WaitingCalls:
    """Each sink has one call. Removing one takes constant time, because all calls of a client leave when it disconnects."""

    __slots__ = ("_by_client", "_by_sink")

    def __init__(self) -> None:
        self._by_sink: dict[ReplySink, WaitingCall] = {}
        # The calls of each client, oldest first.
        self._by_client: dict[str, OrderedDict[WaitingCall, None]] = {}

    def __repr__(self) -> str:
        return f"<WaitingCalls {len(self)} of {len(self._by_client)} clients>"

    def __len__(self) -> int:
        return len(self._by_sink)

    def all(self) -> list[WaitingCall]:
        return [call for calls in self._by_client.values() for call in calls]

    def has(self, sink: ReplySink) -> bool:
        return sink in self._by_sink

    def push(self, call: WaitingCall) -> None:
        calls = self._by_client.get(call.client)
        if calls is None:
            calls = self._by_client[call.client] = OrderedDict()
        calls[call] = None
        self._by_sink[call.sink] = call

    def exceeds_share(self, client: str, bound: int) -> bool:
        """Whether one more call of the client would be more than its share of these places."""
        calls = self._by_client.get(client)
        if calls is None:
            return False
        return len(calls) >= max(1, bound // len(self._by_client))

    def next_client(self, held: Mapping[str, int]) -> str:
        """The client whose turn it is: the one with the fewest calls in flight. `held`: calls in flight, by client."""
        chosen, fewest = "", -1
        for client in self._by_client:
            count = held.get(client, 0)
            if fewest < 0 or count < fewest:
                chosen, fewest = client, count
        return chosen

    def pop(self, client: str) -> WaitingCall:
        """Remove the client's oldest call. Its next one comes after those of clients with as many calls in flight."""
        calls = self._by_client.pop(client)
        call, _ = calls.popitem(last=False)
        if calls:
            self._by_client[client] = calls
        del self._by_sink[call.sink]
        return call

    def count_of(self, client: str) -> int:
        return len(self._by_client.get(client, ()))

    def greediest(self) -> str:
        """The client with the most calls."""
        greediest, most = "", 0
        for client, calls in self._by_client.items():
            if len(calls) > most:
                greediest, most = client, len(calls)
        return greediest

    def pop_newest(self, client: str) -> WaitingCall:
        """Remove the newest call of a client that has several."""
        call, _ = self._by_client[client].popitem()
        del self._by_sink[call.sink]
        return call

    def take_old(self, now: float, patience_s: float) -> list[WaitingCall]:
        """Remove the calls that have waited for too long."""
        old: list[WaitingCall] = []
        for client in [*self._by_client]:
            while client in self._by_client and next(iter(self._by_client[client])).is_too_old(now, patience_s):
                old.append(self.pop(client))
        return old

    def take_all(self) -> list[WaitingCall]:
        calls = self.all()
        self._by_client, self._by_sink = {}, {}
        return calls

    def remove(self, sink: ReplySink) -> bool:
        """Returns whether it had a call here."""
        call = self._by_sink.pop(sink, None)
        if call is None:
            return False
        calls = self._by_client[call.client]
        del calls[call]
        if not calls:
            del self._by_client[call.client]
        return True

    def replace(self, sink: ReplySink, successor: ReplySink) -> None:
        """Let another sink take over a call that waits. It keeps its place."""
        call = self._by_sink.pop(sink, None)
        if call is not None:
            call.pass_to(successor)
            self._by_sink[successor] = call
