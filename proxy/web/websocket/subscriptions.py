"""The subscriptions of one socket: how they start, how their events are sent, how they end.

A notification contains the subscription's id, so sockets with equal ids get equal bytes. The id is therefore a function of the
topic and of how many times the socket has subscribed to it. For almost all clients that is the first time, so an event is
framed once and written to all of them. The id is still unique on its socket and never used there twice. In families with
numeric ids, each socket counts its subscriptions. In families without ids (`echoes_ids`), events have the id of the call that
subscribed, and a socket may subscribe to a topic once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import msgspec

from proxy.core import jsonrpc
from proxy.core.pricing import size_units
from proxy.core.usage import Tally
from proxy.errors import Fault, InternalError, LeasePending, RateLimited, Unavailable
from proxy.memory_budget import BudgetLine
from proxy.request_threads import request_threads
from proxy.services.feed.topics import FeedEvent, NetworkFeed
from proxy.services.rpc.batches import BatchItem
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.flights import Caller
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.rpc_errors import rpc_error_of
from proxy.tasks import client_of_task
from proxy.turn_queue import turns_of_task
from proxy.web.websocket.backlog import Backlog, pause_notice
from proxy.web.websocket.socket_context import EventKind, SocketContext
from proxy.web.websocket.socket_output import SocketOutput
from proxy.web.websocket.subscription_request import SubscriptionRequest, read_id, read_request
from proxy.web.websocket.unit_allowance import UnitAllowance

log = logging.getLogger("penstock.sockets")

# go-ethereum's code and message for an unknown id.
_NOT_FOUND = jsonrpc.error(-32000, "subscription not found")
# CometBFT's for a topic that the socket has already.
_ALREADY = jsonrpc.error(-32603, "Internal error", "already subscribed")
# Bounds the memory of a socket's counts by topic. Beyond it, all counts continue from a number that none of them has reached.
MOST_COUNTS = 1000
# A subscription whose calls would wait longer than this for compute units ends: per-second limits refill sooner, and a daily
# quota would take hours.
LONGEST_PAUSE_S = 60
# Larger params are parsed in a thread: the largest filter takes 4 ms.
READ_AT_ONCE = 16_384
# Larger params cost a unit for each of so many bytes: they take as much time as so many small calls.
BYTES_PER_UNIT = 2048
# Events that may wait for the reply to the batch that created their subscription.
MOST_EARLY = 1000


class SubscriptionIds:
    """Creates the ids of one socket."""

    __slots__ = ("_base", "_counts", "_made")

    def __init__(self) -> None:
        # Counts by the digest of the topic: a topic may be large, and its count outlives its subscription.
        self._counts: dict[bytes, int] = {}
        self._made = 0
        # When the counts were last dropped, no topic had a higher count than this.
        self._base = 0

    def __repr__(self) -> str:
        return f"<SubscriptionIds {self._made} made>"

    def make(self, request: SubscriptionRequest) -> bytes:
        """A new id, as JSON."""
        self._made += 1
        if request.numeric_id:
            return b"%d" % self._made
        topic = blake2b(request.topic.name, digest_size=16).digest()
        count = self._counts.get(topic, self._base) + 1
        if len(self._counts) >= MOST_COUNTS:
            self._counts.clear()
            self._base = self._made
        self._counts[topic] = count
        return b'"0x%b"' % blake2b(b"%b %d" % (topic, count), digest_size=16).hexdigest().encode()


class Subscription:
    """One subscription on one socket: a listener of the feed."""

    __slots__ = (
        "_confirmed",
        "_frame_key",
        "_is_announced",
        "_output",
        "_owner",
        "caller",
        "early",
        "id",
        "is_counted",
        "is_open",
        "kind",
        "notification",
        "place",
        "replays",
        "tally",
        "topic",
    )

    def __init__(
        self, owner: Subscriptions, request: SubscriptionRequest, *, id_: bytes, kind: EventKind, caller: Caller
    ) -> None:
        self._owner = owner
        # Whether the memory of its topic is counted.
        self.is_counted = False
        self._output = owner.output
        self.topic = request.topic
        self.notification = request.notification
        self.id = id_
        # Its key among those of its socket.
        self.place = request.topic.name if request.echoes_id else id_
        self.kind = kind
        self.tally = kind.tally_of(owner.network)
        self.is_open = True
        # The key under which an event caches its frame for sockets with this id and compression.
        self._frame_key = b"%d %b" % (self._output.window_bits, self.id) if self._output.window_bits else self.id
        # Whether it is replaying old blocks. A replay waits for room itself, so none of its events is dropped.
        self.replays = request.from_block is not None
        # The call that created it; events that come before the reply to that call wait in `early`.
        self.caller: Caller | None = caller
        self.early: list[FeedEvent] | None = []
        # Set while a replay waits for that reply.
        self._confirmed: asyncio.Future[None] | None = None
        # Whether the client has been sent the notice that its key has no units left for calls.
        self._is_announced = False

    def __repr__(self) -> str:
        return f"<Subscription {self.id.decode()} {self.topic.kind}{'' if self.is_open else ', closed'}>"

    def on_events(self, events: Sequence[FeedEvent]) -> None:
        """Send directly if possible. One long function for speed, because it runs for every socket of a topic."""
        owner, kind, frame_key = self._owner, self.kind, self._frame_key
        count = len(events)
        units = kind.units * count
        allowance = owner.allowance
        if (
            owner.backlog is not None
            or self.early is not None
            or (allowance.left < units and not allowance.fill(units))
        ):
            self._defer(events)
            return
        allowance.left -= units
        allowance.key.tallies[self.tally].add_units(units)
        kind.sent += count
        if count == 1:
            event = events[0]
            data = event.frames.get(frame_key) or self.frame_of(event)
        else:
            data = b"".join([event.frames.get(frame_key) or self.frame_of(event) for event in events])
        output = self._output
        pending = output.pending
        if pending is None:
            output.pending = data
            queue = output.queue
            if not queue.dirty:
                queue.arm()
            queue.dirty.append(output)
        elif type(pending) is list:
            pending.append(data)
        else:
            output.pending = [pending, data]  # type: ignore[list-item]
        if events[-1].last:
            owner.end(self)

    def _defer(self, events: Sequence[FeedEvent]) -> None:
        if self.early is None:
            self._owner.hold().add(self, events)
            return
        self.early.extend(events)
        if len(self.early) > MOST_EARLY:
            self._owner.on_slow()

    def on_end(self, why: Fault) -> None:
        self._owner.fail(self, why)

    def confirm(self) -> None:
        """The reply with its id is sent: send the events that came before it."""
        early, self.early, self.caller = self.early, None, None
        self.wake()
        if early:
            self.on_events(early)

    def send(self, event: FeedEvent) -> None:
        """Send one event from the backlog. It is paid for."""
        if not self.is_open:
            return
        self.kind.sent += 1
        self._output.send(self.frame_of(event))
        if event.last:
            self._owner.end(self)

    def frame_of(self, event: FeedEvent) -> bytes:
        """The event's frame. It is built once for all sockets with this id, and once more for each compression window."""
        if not self.notification:
            return self._output.message(jsonrpc.result_reply(self.id, event.result))  # Ids of calls differ.
        frame = event.frames.get(self._frame_key)
        if frame is None:
            frame = event.frames[self._frame_key] = self._output.message(
                b'{"jsonrpc":"2.0","method":"%b","params":{"subscription":%b,"result":%b}}'
                % (self.notification, self.id, event.result)
            )
        return frame

    async def room(self) -> None:
        output, owner = self._output, self._owner
        while self.is_open and output.is_open:
            if self.early is not None:
                self._confirmed = asyncio.get_running_loop().create_future()
                await self._confirmed
            elif owner.backlog is not None:
                await owner.backlog.is_over()
            elif output.pending is not None:
                await asyncio.sleep(0)  # Only after the write is it known whether the client reads.
            else:
                return

    @property
    def account(self) -> str:
        return self._owner.allowance.key.account.id

    def charge(self, units: int, tally: Tally) -> bool:
        allowance = self._owner.allowance
        if not allowance.spend(units):
            return False
        allowance.key.tallies[tally].add_units(units)
        return True

    async def wait_for_units(self) -> None:
        allowance = self._owner.allowance
        refusal = allowance.refusal
        if refusal is not None and not isinstance(refusal, LeasePending):
            if not isinstance(refusal, RateLimited) or refusal.retry_after_s > LONGEST_PAUSE_S:
                raise refusal
            if not self._is_announced and self.early is None:
                self._is_announced = True
                self._output.send(self._output.message(pause_notice(self.id, refusal)))
        await allowance.until_retry()

    def wake(self) -> None:
        """It was confirmed, or has ended."""
        if self._confirmed is not None and not self._confirmed.done():
            self._confirmed.set_result(None)


class Subscriptions:
    """All subscriptions of one socket, by id; handles the calls that start and end them."""

    __slots__ = ("_by_id", "_context", "_ids", "_make", "allowance", "backlog", "network", "on_slow", "output")

    def __init__(
        self,
        context: SocketContext,
        output: SocketOutput,
        allowance: UnitAllowance,
        *,
        network: str,
        on_slow: Callable[[], None],
        make: Callable[..., Subscription] = Subscription,
    ) -> None:
        """`on_slow` is called when too many events wait for the client. `make` creates a subscription."""
        self._context = context
        self._make = make
        self.output = output
        self.allowance = allowance
        self.network = network
        self.on_slow = on_slow
        # Events that cannot be sent now; None while they can.
        self.backlog: Backlog | None = None
        self._ids = SubscriptionIds()
        self._by_id: dict[bytes, Subscription] = {}

    def __repr__(self) -> str:
        return f"<Subscriptions {len(self._by_id)}>"

    def __len__(self) -> int:
        return len(self._by_id)

    def subscribe(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None:
        """Serve a call that starts or ends a subscription. The caller gets its outcome now or later."""
        with _failing(caller):
            name = policy.method.name
            if name.endswith("unsubscribe_all"):
                self._end_all()
                caller.on_result(b"{}")
            elif name.lower().endswith("unsubscribe"):
                caller.on_result(self._unsubscribe(policy, params))
            elif len(params) > READ_AT_ONCE:
                self._context.start(lambda: self._start_large(caller, policy, params))
            else:
                self._start(caller, read_request(policy.family, policy.method.name, params))

    async def _start_large(self, caller: Caller, policy: MethodPolicy, params: bytes) -> None:
        """Start a subscription with a filter of thousands of values, which is parsed in a thread and costs more than other
        params of its size."""
        self._take_turns()
        read = partial(read_request, policy.family, policy.method.name, params)
        allowance = self.allowance
        # At most the units of a second, which is all that a bucket holds.
        limit = (allowance.key.own_rate or allowance.key.rate).units_per_second
        units = min(len(params) // BYTES_PER_UNIT, limit or len(params)) - size_units(len(params))
        with _failing(caller):
            if not allowance.spend(units):
                assert allowance.refusal is not None
                raise allowance.refusal
            allowance.key.tallies[policy.tally].add_units(units)
            request = await request_threads.run(read)
            if self.output.is_open:
                self._start(caller, request)

    def _start(self, caller: Caller, request: SubscriptionRequest) -> None:
        context, key = self._context, self.allowance.key
        request = replace(request, topic=context.same_topic(request.topic))
        if request.echoes_id and request.topic.name in self._by_id:
            raise RpcError(_ALREADY)
        feed = self._feed()
        if request.from_block is not None:
            feed.check_from(request.topic, request.from_block)
        is_counted = context.take_memory(key, request.topic)
        try:
            place = context.caps.add_subscription(key, len(self._by_id))
        except RateLimited:
            if is_counted:
                context.give_memory(key, request.topic)
            raise
        kind = context.kinds[request.kind]
        # Calls of sockets have ids, alone and in batches.
        id_ = getattr(caller, "id", b"") or jsonrpc.NULL if request.echoes_id else self._ids.make(request)
        subscription = self._make(self, request, id_=id_, kind=kind, caller=caller)
        subscription.is_counted = is_counted
        self._by_id[subscription.place] = subscription
        kind.open += 1
        context.start(lambda: self._listen(feed, subscription, request.from_block, place))

    @property
    def call_later(self) -> Callable[..., object]:
        return self._context.loop.call_later

    @property
    def memory(self) -> BudgetLine:
        return self._context.memory

    def _feed(self) -> NetworkFeed:
        feed = self._context.feeds.find(self.network)
        if feed is None:
            raise Unavailable(f"{self.network} has no feed")
        return feed

    async def _listen(self, feed: NetworkFeed, subscription: Subscription, from_block: int | None, place: int) -> None:
        """Subscribe to the feed and answer the call. A replay may take long, so its call is answered first. `place`: how many
        subscriptions the account has on this host."""
        try:
            await self._context.caps.check_subscription(self.allowance.key, place)
            if from_block is None:
                await feed.subscribe(subscription.topic, subscription)
                self._answer(subscription)
            else:
                self._answer(subscription)
                # A batch is answered as a whole: nothing is replayed before its reply.
                await subscription.room()
                if subscription.is_open:
                    self._take_turns()
                    await feed.subscribe_from(subscription.topic, subscription, from_block)
                subscription.replays = False
        except RpcError as exc:
            self.fail(subscription, exc)
        except Fault as fault:
            self.fail(subscription, fault)
        except Exception:
            log.exception("unhandled")
            self.fail(subscription, InternalError("internal error"))
        finally:
            if not subscription.is_open:
                feed.unsubscribe(subscription.topic, subscription)

    def _take_turns(self) -> None:
        """Let the current task, which works for this account alone, take turns with the other work of the account."""
        client_of_task.set(self.allowance.key.account.id)
        turns_of_task.set(self._context.limiter.turns)

    def _answer(self, subscription: Subscription) -> None:
        caller = subscription.caller
        if caller is None or not subscription.is_open:
            return
        caller.on_result(subscription.id if subscription.notification else b"{}")
        # The reply to a batch is sent when all its items have one.
        if not isinstance(caller, BatchItem):
            subscription.confirm()

    def confirm(self, items: Collection[BatchItem]) -> None:
        """The reply to a batch is sent."""
        for subscription in [*self._by_id.values()]:
            if subscription.caller in items:
                subscription.confirm()

    def fail(self, subscription: Subscription, why: RpcError | Fault) -> None:
        """End a subscription that failed: by an error to its call, or, if it was confirmed, by an error message."""
        caller, was_open = subscription.caller, subscription.is_open
        self.end(subscription)
        if not was_open:
            return
        if caller is None:
            error = msgspec.json.decode(why.error if isinstance(why, RpcError) else rpc_error_of(why))
            error["data"] = {"subscription": msgspec.Raw(subscription.id), "ended": True}
            id_ = b"" if subscription.notification else subscription.id
            self.output.send(self.output.message(jsonrpc.error_reply(id_, msgspec.json.encode(error))))
        elif isinstance(why, Fault):
            caller.on_fault(why)
        else:
            caller.on_error(why.error)

    def _unsubscribe(self, policy: MethodPolicy, params: bytes) -> bytes:
        """End a subscription by its id, or by its topic. Returns the result of the call."""
        rules = policy.family.subscriptions
        by_topic = rules is not None and rules.echoes_ids
        place = read_request(policy.family, policy.method.name, params).topic.name if by_topic else read_id(params)
        subscription = self._by_id.get(place)
        if subscription is None:
            raise RpcError(_NOT_FOUND)
        self.end(subscription)
        return b"{}" if by_topic else b"true"

    def _end_all(self) -> None:
        for subscription in [*self._by_id.values()]:
            self.end(subscription)

    def end(self, subscription: Subscription) -> None:
        """End a subscription. No event of it is sent after this."""
        if not subscription.is_open:
            return
        subscription.is_open = False
        subscription.kind.open -= 1
        self._context.caps.remove_subscription(self.allowance.key)
        if subscription.is_counted:
            self._context.give_memory(self.allowance.key, subscription.topic)
        subscription.wake()
        del self._by_id[subscription.place]
        if self.backlog is not None:
            self.backlog.forget(subscription)
        self._feed().unsubscribe(subscription.topic, subscription)

    def hold(self) -> Backlog:
        """Queue events from now on, until the backlog is sent."""
        if self.backlog is None:
            self.backlog = Backlog(
                self.output,
                self.allowance,
                max_bytes=self._context.limits.max_queue_bytes,
                on_empty=self._on_empty,
                on_overflow=self.on_slow,
            )
        return self.backlog

    def _on_empty(self) -> None:
        self.backlog = None

    def close(self) -> None:
        self._end_all()
        if self.backlog is not None:
            self.backlog.close()


@contextmanager
def _failing(caller: Caller) -> Iterator[None]:
    """Answer the caller with the error that is raised."""
    try:
        yield
    except RpcError as exc:
        caller.on_error(exc.error)
    except Fault as fault:
        caller.on_fault(fault)
