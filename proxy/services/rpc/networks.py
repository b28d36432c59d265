"""Each network: its upstreams, how far it is, and what is remembered of it.

A `Route` is all that is known of one network. It is built once, with a `Plan` for each method, so that a call finds its price,
its scope and its upstream by one look-up each.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence
from typing import Any, Literal, Protocol

import msgspec

from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core.access import Key
from proxy.core.caching import ReplyCache
from proxy.core.heads import HIGHEST, STALE_S, NetworkHead
from proxy.core.jsonrpc import NULL
from proxy.core.routing import RetryBudget, UpstreamGroup, UpstreamHealth
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import ANY_SCOPE, MethodPolicy
from proxy.services.rpc.shared_cache import SharedCache
from proxy.services.rpc.upstream_batch import UpstreamBatch
from proxy.wire.upstream import Upstream

_NONE: Mapping[str, MethodPolicy] = {}
_NO_LIMIT = 1 << 62
_NULL_BYTES = len(NULL)


class SharedHead:
    """Two numbers of one network in the memory that a host's workers share: the tip, and how often something moved.

    A client's next request may meet another worker. So whoever learns of a new head, or has sent a write, counts one up;
    whoever finds another count than it has seen drops what is recent before it answers. Two that count at once may count
    once: it is another number than before all the same.
    """

    __slots__ = ("_at", "_memory")

    def __init__(self, memory: MutableSequence[int] | memoryview[int], place: int) -> None:
        self._memory = memory
        self._at = 2 * place

    @property
    def tip(self) -> int:
        return self._memory[self._at]

    @property
    def moves(self) -> int:
        return self._memory[self._at + 1]

    def publish(self, tip: int) -> int:
        self._memory[self._at] = tip
        self._memory[self._at + 1] = moves = self._memory[self._at + 1] + 1
        return moves


class CallGuard(Protocol):
    """Stands before a route whose calls are not simply passed on."""

    def fault_of(self, policy: MethodPolicy, params: bytes) -> bytes | None:
        """An error where the params are not what the method takes."""

    def flight(self, caller: Any, key: Key, policy: MethodPolicy, params: bytes, now: float) -> Flight | None:
        """A flight that has to be launched; None where the asker is answered otherwise."""


class Route:
    """One network, as calls see it."""

    __slots__ = (
        "_head_block", "_short", "any_scope", "beside", "broadcast", "budget", "call_timeout_s", "coalesces", "flights",
        "group", "guard", "head_reader", "heads", "is_live", "keeps", "max_body", "network", "on_null", "on_split", "only",
        "policies", "replies", "seen_moves", "shared_cache", "shared_head", "unknown", "upstreams",
    )  # fmt: skip

    def __init__(
        self,
        network: Network,
        upstreams: Sequence[Upstream],
        policies: dict[str, MethodPolicy],
        replies: ReplyCache,
        shared_head: SharedHead,
        *,
        unknown: MethodPolicy,
        broadcast: int,
        call_timeout_s: float,
        lag_s: float,
        keeps: bool,
        coalesces: bool,
        any_scope: int = ANY_SCOPE,
        max_body: int = _NO_LIMIT,
    ) -> None:
        facts = network.facts
        self.network = network
        self.upstreams = tuple(upstreams)
        self.group = UpstreamGroup([upstream.health for upstream in upstreams])
        self.policies = policies
        # Stands for every method that is not there.
        self.unknown = unknown
        self.replies = replies
        # What the workers of a host tell each other: see `Marks`.
        self.shared_head = shared_head
        self.seen_moves = 0
        self.heads = NetworkHead(
            block_time_s=facts.block_time_s,
            finality_blocks=facts.finality_blocks,
            behind_blocks=max(2, round(lag_s / facts.block_time_s)),
        )
        self.head_reader = family_of(network).head
        self._head_block = (-1, "", "")
        self.budget = RetryBudget()
        # How many upstreams a signed transaction is sent to.
        self.broadcast = min(broadcast, len(self.upstreams))
        self.call_timeout_s = call_timeout_s
        self.keeps = keeps
        self.coalesces = coalesces
        # Flights that others may join, by what they ask.
        self.flights: dict[bytes, Flight] = {}
        # Where other workers' replies stand, if there is such a place.
        self.shared_cache: SharedCache | None = None
        self.on_split: Callable[[Flight, bytes], bool] | None = None
        self.on_null: Callable[[Flight], bool] | None = None
        self.guard: CallGuard | None = None
        # The route of the same network's chain, for one that is not the chain itself.
        self.beside: Route | None = None
        # Of these scopes a key needs one to ask here at all; and the most bytes that a request may have.
        self.any_scope = any_scope
        self.max_body = max_body
        self.only = self.upstreams[0] if len(self.upstreams) == 1 else None
        self.is_live = network.is_live
        self._short: dict[int, Mapping[str, MethodPolicy]] = {}
        for policy in policies.values():
            policy.shared = policy.keeps and (keeps or coalesces)
            is_simple = policy.may_repeat and not policy.by_range and not policy.is_checked
            policy.short = is_simple and (policy.shared or self._only_serves(policy))

    def __repr__(self) -> str:
        return f"<Route {self.network.id}: {len(self.upstreams)} upstreams, {self.heads!r}>"

    def _only_serves(self, policy: MethodPolicy) -> bool:
        return self.only is not None and self.only.health.may_serve(policy.method.name)

    def short_policies(self, key: Key) -> Mapping[str, MethodPolicy]:
        """The methods whose calls may take the short way (web/front/client), if this key's may at all."""
        if key.locked or key.account.day_limit or key.dies_at < math.inf or (self.is_live and not key.live):
            return _NONE
        found = self._short.get(key.scopes)
        if found is None:
            found = {
                name: policy for name, policy in self.policies.items() if policy.short and key.scopes & policy.scope
            }
            self._short[key.scopes] = found
        return found

    def launch(self, flight: Flight, now: float) -> None:
        if self.only is None:
            self.budget.earn()
        flight.start(now)

    def launch_many(self, flights: Sequence[Flight], now: float) -> None:
        """Calls of one batch: in few requests where the upstream takes batches."""
        together = [flight for flight in flights if flight.policy.may_repeat and not flight.archive]
        upstream = self.choose(together[0], now, 0) if len(together) > 1 else None
        if upstream is None or upstream.batch < 2:
            together = []
        else:
            health = upstream.health
            together = [flight for flight in together if health.may_serve(flight.policy.method.name)]
            together = [flight for flight in together if not health.head or health.head >= flight.least_head]
        alone = set(flights).difference(together)
        for flight in flights:
            if flight in alone:
                self.launch(flight, now)
        for start in range(0, len(together), upstream.batch if upstream else 1):
            assert upstream is not None
            UpstreamBatch(together[start : start + upstream.batch]).send(upstream, now)
        for _ in together:
            self.budget.earn()

    def choose(self, flight: Flight, now: float, tried: int) -> Upstream | None:
        name = flight.policy.method.name
        if (only := self.only) is not None:
            return None if tried or not only.health.takes_calls(now) or not only.health.may_serve(name) else only
        found = self.group.choose(now, name, tried=tried, head=flight.least_head, archive=flight.archive)
        return None if found is None else self.upstreams[found.index]

    def landed(self, flight: Flight) -> None:
        if flight.slot is not None and self.flights.get(flight.slot) is flight:
            del self.flights[flight.slot]

    def keep(self, flight: Flight, result: bytes | msgspec.Raw) -> None:
        """Remember a result for as long as it is true. A write that landed makes all recent answers doubtful."""
        policy = flight.policy
        if policy.method.kind == "write":
            self.forget_recent()
            return
        if flight.slot is None or not self.keeps or not self.heads.tip:
            return
        raw = bytes(result)
        if policy.shows_block:
            self.heard_of(raw)
        ref = policy.family.block_ref(policy.method, flight.params)
        lifetime = policy.family.lifetime(policy.method, flight.params, raw, ref, self.heads.tip, self.heads.final)
        if lifetime == "forever" or (lifetime == "head" and flight.moves == self.replies.moves):
            self.replies.put(flight.slot, raw, lifetime)
            if lifetime == "forever" and self.shared_cache is not None:
                self.shared_cache.put(flight.slot, raw)

    def forget_recent(self) -> None:
        """What was true until now may not be: here, and in every other worker."""
        if self.shared_head.moves != self.seen_moves:
            # Another worker may have told a newer block meanwhile: ours must not take its place.
            self.heads.raise_to(self.shared_head.tip)
        self.replies.head_moved()
        self.flights.clear()
        self.seen_moves = self.shared_head.publish(self.heads.tip)

    def catch_up(self) -> None:
        """Another worker learnt of a write or of a new head before us."""
        self.seen_moves = self.shared_head.moves
        self.replies.head_moved()
        self.flights.clear()
        self.heads.raise_to(self.shared_head.tip)

    def is_null(self, result: bytes | msgspec.Raw) -> bool:
        """Of an answer that another may know better, or that may tell of a block before its chain does."""
        if len(result) == _NULL_BYTES:
            return True
        if self.beside is not None:
            self.beside.heard_of(bytes(result))
        return False

    def heard_of(self, result: bytes) -> None:
        """Something is in a block that we have not seen: whoever learns that must not be told then what was true before."""
        found = self.head_reader.newest_block(result)
        if found is not None and found > self.heads.tip:
            self.forget_recent()

    def ask_on(self, flight: Flight) -> bool:
        return self.on_null is not None and self.on_null(flight)

    def split(self, flight: Flight, error: bytes) -> bool:
        return self.on_split is not None and self.on_split(flight, error)

    # The head

    def observe_heads(self, now: float) -> None:
        what = self.heads.observe(self.group.members, now)
        if what == "reset":
            self.replies.clear()
            self.seen_moves = self.shared_head.moves  # What the others have told is of the chain as it was.
            if self.shared_cache is not None:
                self.shared_cache.chain = ""
        # What is recent is only known while somebody says where the head is.
        if what != "still" or not self.hears(now):
            self.forget_recent()

    def hears(self, now: float) -> bool:
        return now - self.heads.heard_at < STALE_S

    def saw_block(self, upstream: int, number: str, block_hash: str) -> None:
        """The head of one upstream. Another hash at the same height: the chain was reorganised."""
        was, self._head_block = self._head_block, (upstream, number, block_hash)
        if was[:2] == (upstream, number) and was[2] != block_hash:
            self.forget_recent()

    def compare_head(self, result: bytes, health: UpstreamHealth, now: float) -> Literal["fine", "behind", "future"]:
        """What an answer that tells the head means for what we know."""
        number = self.head_reader.read_number(result)
        return "fine" if number is None else self.compare_number(number, health, now)

    def compare_number(self, number: int, health: UpstreamHealth, now: float) -> Literal["fine", "behind", "future"]:
        """The same, of a head that an upstream has told in whatever way."""
        if not self.heads.agreed:
            return "fine"
        if self.only is not None:
            if self.heads.tip < number <= HIGHEST:
                self.heads.raise_to(number)
                self.forget_recent()
            return "fine"
        if not self.heads.is_plausible(number, now):
            return "future"
        if number < self.heads.tip:
            return "behind"
        if number > health.head:
            health.saw_head(number, now)
        if number > self.heads.tip:
            self.heads.raise_to(number)
            self.forget_recent()
        return "fine"

    def head_number(self) -> bytes:
        return self.head_reader.write_number(self.heads.tip)


class Networks:
    """All routes of a worker, by network id."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = {route.network.id: route for route in routes}

    def __repr__(self) -> str:
        return f"<Networks {len(self.routes)}>"

    def find(self, network: Network) -> Route | None:
        return self.routes.get(network.id)

    def sweep(self) -> None:
        """Deadlines and hedges."""
        now = time.monotonic()
        for route in self.routes.values():
            if route.only is not None:
                # The short way earns nothing: this is what a retry on the only upstream is paid from.
                route.budget.earn()
            for upstream in route.upstreams:
                upstream.tick(now)

    def counts(self) -> list[tuple[str, str, int, int]]:
        """For each upstream how many calls it answered and failed."""
        return [
            (route.network.id, upstream.label, upstream.health.good, upstream.health.bad)
            for route in self.routes.values()
            for upstream in route.upstreams
        ]

    def close(self) -> Awaitable[object]:
        return asyncio.gather(*[upstream.close() for route in self.routes.values() for upstream in route.upstreams])
