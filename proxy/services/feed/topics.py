"""What can be listened to, who listens, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from proxy.chains.evm.log_filter import LogFilter
from proxy.core import jsonrpc
from proxy.errors import Fault
from proxy.services.rpc.calls import RpcError

# Different topics on one network in one worker: beyond that new ones are refused, so that memory stays bounded.
MOST_TOPICS = 100_000


class Topic(NamedTuple):
    """One thing to listen to. Equal topics are one: whoever listens to them shares all the work.

    `kind` is newHeads, logs, newPendingTransactions or syncing; or, in the svm family, the method that subscribes.
    `detail` is the filter of logs, whether pending transactions are wanted whole, or the params of the method as bytes.
    """

    kind: str
    detail: LogFilter | bool | bytes | None = None

    @property
    def name(self) -> bytes:
        """What tells it from all others, for making ids: the same in every process."""
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

    `block` is the block it belongs to, 0 where it has none. `last`: the subscription ends with it. `frames` is the socket
    side's: the finished frame by subscription id, so that it is built once for all sockets.
    """

    result: bytes
    block: int = 0
    last: bool = False
    frames: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)


class Listener(Protocol):
    """One subscription on one socket."""

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        """In order. It never blocks and never raises."""

    def on_end(self, why: Fault) -> None:
        """Nothing more is told."""

    async def room(self) -> None:
        """Returns when it can take more: a replay waits for it between its batches, so that it cannot flood anybody."""


class NetworkFeed(Protocol):
    """One network's feed."""

    async def subscribe(self, topic: Topic, listener: Listener) -> None:
        """Once this returns, everything that happens is told. RpcError or Fault where the network cannot have it."""

    async def subscribe_from(self, topic: Topic, listener: Listener, from_block: int) -> None:
        """Replay from that block, then live without a seam; it returns when the replay is over. RpcError or Fault as above,
        before the first event, or in the middle where the upstreams fail. May be cancelled; `unsubscribe` ends it too."""

    def check_from(self, topic: Topic, from_block: int) -> None:
        """RpcError where such a replay would be refused: to say so before the subscription is confirmed."""

    def unsubscribe(self, topic: Topic, listener: Listener) -> None:
        """Nothing is told after this. Whoever does not listen is ignored."""

    async def run(self) -> None:
        """A supervised loop. Without listeners it asks nothing of the upstreams."""


class Feeds:
    """All feeds of a worker, by network id."""

    def __init__(self, feeds: Mapping[str, NetworkFeed]) -> None:
        self.by_network = dict(feeds)

    def __repr__(self) -> str:
        return f"<Feeds {len(self.by_network)}>"

    def find(self, network_id: str) -> NetworkFeed | None:
        return self.by_network.get(network_id)


def refusal(message: str, code: int = jsonrpc.INVALID_PARAMS) -> RpcError:
    """Why a subscription cannot be had, in words that say what to change."""
    return RpcError(jsonrpc.error(code, message))
