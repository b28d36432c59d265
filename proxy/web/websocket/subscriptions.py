"""The subscriptions of one socket: how they begin, what they are told, how they end.

A notification holds the subscription's id, so equal ids make equal bytes. The id is therefore made from the topic and from how
many times the socket has subscribed to it: almost everybody's first, so that an event is framed once and written to all. It
still is unique to its socket, and never used there twice. The svm family counts its ids, as its clients expect numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from proxy.core import jsonrpc
from proxy.core.usage import Tally
from proxy.errors import Fault, InternalError, Unavailable
from proxy.services.feed.topics import FeedEvent, NetworkFeed, Topic
from proxy.services.rpc.batches import BatchItem, rpc_error_of
from proxy.services.rpc.calls import Caller, RpcError
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.web.websocket.frames import frame
from proxy.web.websocket.subscription_request import SubscriptionRequest, read_id, read_wish

if TYPE_CHECKING:
    from proxy.web.websocket.client_socket import ClientSocket

log = logging.getLogger("penstock.sockets")

# go-ethereum's code and words for an id that is not there.
_NOT_FOUND = jsonrpc.error(-32000, "subscription not found")
# Topics whose counts one socket remembers. Past that it counts on from a number that none of them has reached.
MOST_COUNTS = 1000
# Events that wait for the answer to the batch in which their subscription was asked for.
MOST_EARLY = 1000


class EventKind:
    """Events of one kind in this worker: their price, and counts in fixed places."""

    __slots__ = ("_tallies", "dropped", "name", "open", "sent", "units")

    def __init__(self, name: str, units: int) -> None:
        self.name = name
        self.units = units
        self.open = 0
        self.sent = 0
        self.dropped = 0
        self._tallies: dict[str, Tally] = {}

    def tally_of(self, network: str) -> Tally:
        """What keys' own counts stand under: an event has units, and is no request."""
        return self._tallies.get(network) or self._tallies.setdefault(network, Tally(network, f"event:{self.name}"))

    def __repr__(self) -> str:
        return f"<EventKind {self.name}: {self.open} open, {self.sent} sent, {self.dropped} dropped>"


def kinds_of(prices: Mapping[str, int]) -> dict[str, EventKind]:
    return {name: EventKind(name, units) for name, units in prices.items()}


# Ids


class SubscriptionIds:
    """The ids of one socket."""

    __slots__ = ("_base", "_counts", "_made")

    def __init__(self) -> None:
        self._counts: dict[Topic, int] = {}
        self._made = 0
        # No topic was subscribed to more often than this before the counts were last dropped.
        self._base = 0

    def __repr__(self) -> str:
        return f"<SubscriptionIds {self._made} made>"

    def make(self, wish: SubscriptionRequest) -> bytes:
        """As JSON."""
        self._made += 1
        if wish.numeric_id:
            return b"%d" % self._made
        topic = wish.topic
        count = self._counts.get(topic, self._base) + 1
        if len(self._counts) >= MOST_COUNTS:
            self._counts.clear()
            self._base = self._made
        self._counts[topic] = count
        return b'"0x%b"' % blake2b(b"%b %d" % (topic.name, count), digest_size=16).hexdigest().encode()


# Listening


class Subscription:
    """One subscription on one socket."""

    __slots__ = (
        "_settled", "caller", "early", "id", "is_open", "kind", "notice", "replays", "socket", "tally", "topic",
    )  # fmt: skip

    def __init__(
        self, socket: ClientSocket, wish: SubscriptionRequest, *, id_: bytes, kind: EventKind, caller: Caller
    ) -> None:
        self.socket = socket
        self.topic = wish.topic
        self.notice = wish.notice
        self.id = id_
        self.kind = kind
        self.tally = kind.tally_of(socket.route.network.id)
        self.is_open = True
        # Whether it is told of old blocks. That waits for room by itself, so nothing of it is ever dropped.
        self.replays = wish.from_block is not None
        # Whoever asked for it; events that come before the answer to that wait for it.
        self.caller: Caller | None = caller
        self.early: list[FeedEvent] | None = []
        # What a replay waits for until then.
        self._settled: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Subscription {self.id.decode()} {self.topic.kind}{'' if self.is_open else ', closed'}>"

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        """Straight to the transport where nothing is in the way. In one piece, since it is run for every socket of a topic."""
        socket, kind, id_ = self.socket, self.kind, self.id
        count = len(events)
        units = kind.units * count
        purse = socket.purse
        if socket.held is not None or self.early is not None or (purse.left < units and not purse.fill(units)):
            self._hold(events)
            return
        purse.left -= units
        socket.key.sheet[self.tally].units += units
        kind.sent += count
        if count == 1:
            event = events[0]
            data = event.frames.get(id_) or self.frame_of(event)
        else:
            data = b"".join([event.frames.get(id_) or self.frame_of(event) for event in events])
        pending = socket.pending
        if pending is None:
            socket.pending = data
            room = socket.room
            if not room.dirty:
                room.arm()
            room.dirty.append(socket)
        elif type(pending) is list:
            pending.append(data)
        else:
            socket.pending = [pending, data]  # type: ignore[list-item]
        if events[-1].last:
            socket.subscriptions.end(self)

    def _hold(self, events: Sequence[FeedEvent]) -> None:
        if self.early is None:
            self.socket.hold(self, events)
            return
        self.early.extend(events)
        if len(self.early) > MOST_EARLY:
            self.socket.close_slow()

    def on_end(self, why: Fault) -> None:
        self.socket.subscriptions.fail(self, why)

    def confirm(self) -> None:
        """The answer with its id is on its way: what came before it follows."""
        early, self.early, self.caller = self.early, None, None
        self.wake()
        if early:
            self.on_events(early)

    def send(self, event: FeedEvent) -> None:
        """One event that was held back and is paid for."""
        if not self.is_open:
            return
        self.kind.sent += 1
        self.socket.send(self.frame_of(event))
        if event.last:
            self.socket.subscriptions.end(self)

    def frame_of(self, event: FeedEvent) -> bytes:
        """Built once for all sockets that have this id."""
        found = event.frames.get(self.id)
        if found is None:
            found = event.frames[self.id] = frame(
                b'{"jsonrpc":"2.0","method":"%b","params":{"subscription":%b,"result":%b}}'
                % (self.notice, self.id, event.result)
            )
        return found

    async def room(self) -> None:
        socket = self.socket
        while self.is_open and socket.is_open:
            if self.early is not None:
                self._settled = asyncio.get_running_loop().create_future()
                await self._settled
            elif socket.held is not None:
                await socket.held.is_over()
            elif socket.pending is not None:
                await asyncio.sleep(0)  # Whether the client takes it is known when it is written.
            else:
                return

    def wake(self) -> None:
        """It was confirmed, or has ended."""
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)


class Subscriptions:
    """All of one socket, by their ids: where its calls begin and end them."""

    __slots__ = ("_by_id", "_ids", "_socket")

    def __init__(self, socket: ClientSocket) -> None:
        self._socket = socket
        self._ids = SubscriptionIds()
        self._by_id: dict[bytes, Subscription] = {}

    def __repr__(self) -> str:
        return f"<Subscriptions {len(self._by_id)}>"

    def __len__(self) -> int:
        return len(self._by_id)

    def subscribe(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None:
        """A call that begins or ends one: it is told what became of it, now or later."""
        name = policy.method.name
        try:
            if name.lower().endswith("unsubscribe"):
                self._end(params)
                caller.on_result(b"true")
            else:
                self._begin(caller, policy, params)
        except RpcError as exc:
            caller.on_error(exc.error)
        except Fault as fault:
            caller.on_fault(fault)

    def _begin(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None:
        socket, room = self._socket, self._socket.room
        wish = read_wish(policy.family, policy.method.name, params)
        feed = self._feed()
        room.check_subscriptions(socket.key, len(self._by_id))
        if wish.from_block is not None:
            feed.check_from(wish.topic, wish.from_block)
        made = Subscription(socket, wish, id_=self._ids.make(wish), kind=room.kinds[wish.kind], caller=caller)
        self._by_id[made.id] = made
        made.kind.open += 1
        room.subscribed(socket.key, 1)
        room.start(lambda: self._listen(feed, made, wish.from_block))

    def _feed(self) -> NetworkFeed:
        feed = self._socket.room.feeds.find(self._socket.route.network.id)
        if feed is None:
            raise Unavailable(f"{self._socket.route.network.id} has no feed")
        return feed

    async def _listen(self, feed: NetworkFeed, made: Subscription, from_block: int | None) -> None:
        """Ask the feed, and answer the call: at once where old blocks come first, for they may take their time."""
        try:
            if from_block is None:
                await feed.subscribe(made.topic, made)
                self._answer(made)
            else:
                self._answer(made)
                # In a batch, the answer is that of all its calls: nothing is replayed before it.
                await made.room()
                if made.is_open:
                    await feed.subscribe_from(made.topic, made, from_block)
                made.replays = False
        except RpcError as exc:
            self.fail(made, exc)
        except Fault as fault:
            self.fail(made, fault)
        except Exception:
            log.exception("unhandled")
            self.fail(made, InternalError("internal error"))
        finally:
            if not made.is_open:
                feed.unsubscribe(made.topic, made)

    def _answer(self, made: Subscription) -> None:
        caller = made.caller
        if caller is None or not made.is_open:
            return
        caller.on_result(made.id)
        # A batch has its answer when all of it is there.
        if not isinstance(caller, BatchItem):
            made.confirm()

    def confirm(self, items: Collection[BatchItem]) -> None:
        """The answer to a batch is on its way."""
        for made in [*self._by_id.values()]:
            if made.caller in items:
                made.confirm()

    def fail(self, made: Subscription, why: RpcError | Fault) -> None:
        """It could not be had; or, where it was confirmed before, it ends here and the client is told so."""
        caller, was_open = made.caller, made.is_open
        self.end(made)
        if not was_open:
            return
        if caller is None:
            told = msgspec.json.decode(why.error if isinstance(why, RpcError) else rpc_error_of(why))
            told["data"] = {"subscription": msgspec.Raw(made.id), "ended": True}
            self._socket.send(frame(jsonrpc.error_reply(b"", msgspec.json.encode(told))))
        elif isinstance(why, Fault):
            caller.on_fault(why)
        else:
            caller.on_error(why.error)

    def _end(self, params: bytes) -> None:
        found = self._by_id.get(read_id(params))
        if found is None:
            raise RpcError(_NOT_FOUND)
        self.end(found)

    def end(self, made: Subscription) -> None:
        """Nothing is told after this."""
        if not made.is_open:
            return
        made.is_open = False
        made.kind.open -= 1
        self._socket.room.subscribed(self._socket.key, -1)
        made.wake()
        del self._by_id[made.id]
        if self._socket.held is not None:
            self._socket.held.forget(made)
        self._feed().unsubscribe(made.topic, made)

    def close(self) -> None:
        for made in [*self._by_id.values()]:
            self.end(made)
