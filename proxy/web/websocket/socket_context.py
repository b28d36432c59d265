"""State that all WebSockets of a worker share: services, limits, prices, and counts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from proxy.chains.evm.log_filter import LogFilter
from proxy.core.access import Key
from proxy.core.directives import Directives
from proxy.core.usage import Tally
from proxy.errors import RateLimited
from proxy.memory_budget import BudgetLine
from proxy.services.accounts.admission import Admission
from proxy.services.accounts.socket_caps import SocketCaps
from proxy.services.feed.topics import Feeds, Topic
from proxy.services.rpc.networks import Route
from proxy.services.rpc.rpc_service import RpcService
from proxy.settings import SocketSettings
from proxy.tasks import Tasks
from proxy.web.call_accounting import CallAccounting
from proxy.web.front.connection_limiter import ConnectionLimiter
from proxy.web.websocket.large_messages import LargeMessages
from proxy.web.websocket.socket_output import FlushQueue

# The memory of smaller topics is bounded by the number of an account's subscriptions.
COUNTED_FROM = 4096
_TOO_LARGE = (
    "the filters of this account's subscriptions take too much memory: unsubscribe from some, or name fewer addresses and "
    "topics in each"
)


@dataclass(frozen=True, slots=True)
class SocketTerms:
    """The outcome of a handshake: it applies to every call of the socket. With `window_bits` 0, nothing is compressed."""

    route: Route
    key: Key
    request_id: str
    directives: Directives | None = None
    window_bits: int = 0


class EventKind:
    """Events of one kind in this worker: their price and their counts."""

    __slots__ = ("_tallies", "dropped", "name", "open", "sent", "units")

    def __init__(self, name: str, units: int) -> None:
        self.name = name
        self.units = units
        self.open = 0
        self.sent = 0
        self.dropped = 0
        self._tallies: dict[str, Tally] = {}

    def __repr__(self) -> str:
        return f"<EventKind {self.name}: {self.open} open, {self.sent} sent, {self.dropped} dropped>"

    def tally_of(self, network: str) -> Tally:
        """The tally for keys' usage. An event has units but is not a request."""
        return self._tallies.get(network) or self._tallies.setdefault(network, Tally(network, f"event:{self.name}"))


class SocketContext:
    def __init__(
        self,
        limits: SocketSettings,
        *,
        limiter: ConnectionLimiter,
        admission: Admission,
        caps: SocketCaps,
        rpc: RpcService,
        feeds: Feeds,
        prices: Mapping[str, int],
        tasks: Tasks,
        accounting: CallAccounting,
        memory: BudgetLine,
    ) -> None:
        """`memory`: that of subscriptions."""
        self.limits = limits
        self.limiter = limiter
        self.admission = admission
        self.caps = caps
        self.rpc = rpc
        self.feeds = feeds
        self.kinds = {name: EventKind(name, units) for name, units in prices.items()}
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.queue = FlushQueue(self.loop)
        self.large_messages = LargeMessages(self.loop)
        # Rounds of pings that may pass without a byte from the client.
        self.silent_rounds = max(1, round(limits.idle_s / limits.ping_s))
        self._tasks = tasks
        self.accounting = accounting
        self.memory = memory
        # The filters of open subscriptions by their hashes: equal ones are held once.
        self._filters: WeakValueDictionary[int, LogFilter] = WeakValueDictionary()
        self._serial = itertools.count(1)

    def __repr__(self) -> str:
        return f"<SocketContext {sum(kind.open for kind in self.kinds.values())} subscriptions>"

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a supervised task for one subscription."""
        self._tasks.start_once("subscription", work, of=next(self._serial))

    def same_topic(self, topic: Topic) -> Topic:
        """An equal topic, with the filter that other subscriptions have."""
        if not isinstance(topic.detail, LogFilter):
            return topic
        shared = self._filters.setdefault(hash(topic.detail), topic.detail)
        return Topic(topic.kind, shared) if shared == topic.detail else topic

    def take_memory(self, key: Key, topic: Topic) -> bool:
        """Count the memory of a topic, once for all subscriptions of the account. Raises RateLimited if the account has no
        room for it. Returns False for a small topic, which is not counted."""
        size = topic.memory
        if size < COUNTED_FROM:
            return False
        if not self.memory.take_shared(key.account.id, topic.detail, size):
            raise RateLimited(_TOO_LARGE, retry_after_s=1)
        return True

    def give_memory(self, key: Key, topic: Topic) -> None:
        self.memory.give_shared(key.account.id, topic.detail, topic.memory)
