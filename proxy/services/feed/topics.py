"""The vocabulary of the feed: topics, events, listeners, and the interface that every family's feed implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from proxy.chains.evm.log_filter import LogFilter
from proxy.core import jsonrpc
from proxy.core.usage import Tally
from proxy.errors import Fault
from proxy.services.rpc.calls import RpcError


class Topic(NamedTuple):
    """One event stream. All listeners of equal topics share the work.

    `kind` is newHeads, logs, newPendingTransactions or syncing; in the svm family it is the subscribe method.
    `detail` is the log filter, whether pending transactions are sent in full, or the params of the method as bytes.
    """

    kind: str
    detail: LogFilter | bool | bytes | None = None

    @property
    def memory(self) -> int:
        """Its approximate size in memory, in bytes."""
        match self.detail:
            case bytes():
                return len(self.detail)
            case LogFilter():
                return self.detail.memory
            case _:
                return 0

    @property
    def name(self) -> bytes:
        """A unique name from which subscription ids are made. It is the same in every process."""
        match self.detail:
            case None:
                rest = b""
            case bool():
                rest = b"%d" % self.detail
            case bytes():
                rest = self.detail
            case _:
                rest = msgspec.json.encode(self.detail)
        return b"%b %b" % (self.kind.encode(), rest)


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One notification: the JSON of `params.result`.

    `block` is the block it belongs to, 0 if it has none. `last` marks the event that ends the subscription. `frames` is for
    the WebSocket side: the encoded frame by subscription id, built once for all sockets.
    """

    result: bytes
    block: int = 0
    last: bool = False
    frames: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)


class Listener(Protocol):
    """One subscription on one socket. Its key pays for the calls that are made for it alone."""

    @property
    def account(self) -> str:
        """The id of the key's account."""

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        """Receive events in order. Must neither block nor raise."""

    def on_end(self, why: Fault) -> None:
        """The subscription has ended; no more events follow."""

    async def room(self) -> None:
        """Return when the listener can take more. A replay waits here between batches, so that it floods no client."""

    def charge(self, units: int, tally: Tally) -> bool:
        """Charge the key for a call before it is made, and count its units in the tally. False if the key has none left."""

    async def wait_for_units(self) -> None:
        """Return when the key may have units again. Raises the refusal if that takes long."""


class NetworkFeed(Protocol):
    """One network's feed."""

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        """Start a subscription: every event after this returns is sent. Raises RpcError or Fault if it cannot be served."""

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        """Replay from the block, then go live without a gap; returns when the replay is over. Raises RpcError or Fault before
        the first event, or in the middle if the upstreams fail. May be cancelled; `unsubscribe` ends it too."""

    def check_from(self, topic: Topic, from_block: int) -> None:
        """Raise RpcError if such a replay would be refused, so that the client learns it before the confirmation."""

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        """End a subscription: no event follows. Unknown listeners are ignored."""

    async def run(self) -> None:
        """Supervised loop. Without listeners it sends nothing to the upstreams."""


class Feeds:
    """All feeds of a worker, by network id."""

    def __init__(self, feeds: Mapping[str, NetworkFeed]) -> None:
        self.by_network = dict(feeds)

    def __repr__(self) -> str:
        return f"<Feeds {len(self.by_network)}>"

    def find(self, network_id: str) -> NetworkFeed | None:
        return self.by_network.get(network_id)


def refusal(message: str, code: int = jsonrpc.INVALID_PARAMS) -> RpcError:
    """The JSON-RPC error for a refused subscription. The message says what to change."""
    return RpcError(jsonrpc.error(code, message))
