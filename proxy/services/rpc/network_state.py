"""The state of one network in this process: its upstreams, its head, and the replies that are true at that head.

Replies are cached for ever or until the head moves. A new head, a reorganisation or a write makes recent replies out of date,
here and in the other workers of the host, which learn of it through the shared head.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Literal

import msgspec

from proxy.chains.family import HeadReader
from proxy.core.caching import ReplyCache
from proxy.core.heads import HIGHEST, STALE_S, NetworkHead
from proxy.core.jsonrpc import NULL
from proxy.core.routing import UpstreamGroup, UpstreamHealth
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.shared_cache import SharedCache
from proxy.wire.upstream import Upstream

_NULL_BYTES = len(NULL)
# How a head that an upstream reports compares with ours.
HeadComparison = Literal["current", "behind", "future"]


class SharedHead:
    """Two numbers of one network in the memory that a host's workers share: the tip, and a counter of moves.

    A client's next request may reach another worker. So a worker that learns of a new head, or has sent a write, increments the
    counter; a worker that sees another count than its own discards its recent replies before it replies. Two workers that
    increment at once may count once: the number still differs from the one before.
    """

    __slots__ = ("_index", "_memory")

    def __init__(self, memory: MutableSequence[int] | memoryview[int], index: int) -> None:
        self._memory = memory
        self._index = 2 * index

    @property
    def tip(self) -> int:
        return self._memory[self._index]

    @property
    def moves(self) -> int:
        return self._memory[self._index + 1]

    def publish(self, tip: int) -> int:
        self._memory[self._index] = tip
        self._memory[self._index + 1] = moves = self._memory[self._index + 1] + 1
        return moves


class NetworkState:
    __slots__ = (
        "_head_block", "caches", "chain", "flights", "group", "head_reader", "heads", "network_id", "only", "replies",
        "seen_moves", "shared_cache", "shared_head", "upstreams",
    )  # fmt: skip

    def __init__(
        self,
        network_id: str,
        upstreams: Sequence[Upstream],
        heads: NetworkHead,
        head_reader: HeadReader,
        replies: ReplyCache,
        shared_head: SharedHead,
        *,
        caches: bool,
    ) -> None:
        self.network_id = network_id
        self.upstreams = tuple(upstreams)
        self.group = UpstreamGroup([upstream.health for upstream in upstreams])
        self.only = self.upstreams[0] if len(self.upstreams) == 1 else None
        self.heads = heads
        self.head_reader = head_reader
        self.replies = replies
        self.shared_head = shared_head
        self.seen_moves = 0
        # Whether replies are cached.
        self.caches = caches
        # Replies that other workers and hosts have cached, if a shared cache is configured.
        self.shared_cache: SharedCache | None = None
        # Flights that the same call may join, by cache key.
        self.flights: dict[bytes, Flight] = {}
        # For bundlers: the state of the chain that they serve.
        self.chain: NetworkState | None = None
        self._head_block = (-1, "", "")

    def __repr__(self) -> str:
        return f"{self.network_id}: {len(self.upstreams)} upstreams, {self.heads!r}"

    # Replies

    def landed(self, flight: Flight) -> None:
        """The flight can no longer be joined."""
        if flight.slot is not None and self.flights.get(flight.slot) is flight:
            del self.flights[flight.slot]

    def keep(self, flight: Flight, result: bytes | msgspec.Raw) -> None:
        """Cache a result for as long as it is true. A write makes recent replies out of date."""
        policy = flight.policy
        if policy.method.kind == "write":
            self.forget_recent()
            return
        if flight.slot is None or not self.caches or not self.heads.tip:
            return
        raw = bytes(result)
        if policy.shows_block:
            self.note_block(raw)
        ref = policy.family.block_ref(policy.method, flight.params)
        lifetime = policy.family.lifetime(policy.method, flight.params, raw, ref, self.heads.tip, self.heads.final)
        if lifetime == "forever" or (lifetime == "head" and flight.moves == self.replies.moves):
            self.replies.put(flight.slot, raw, lifetime)
            if lifetime == "forever" and self.shared_cache is not None:
                self.shared_cache.put(flight.slot, raw)

    def forget_recent(self) -> None:
        """Discard replies that depend on the head: here, and in every other worker."""
        if self.shared_head.moves != self.seen_moves:
            # Another worker may have published a newer block meanwhile: do not overwrite it with an older one.
            self.heads.raise_to(self.shared_head.tip)
        self.replies.head_moved()
        self.flights.clear()
        self.seen_moves = self.shared_head.publish(self.heads.tip)

    def catch_up(self) -> None:
        """Another worker learned of a write or of a new head before this one."""
        self.seen_moves = self.shared_head.moves
        self.replies.head_moved()
        self.flights.clear()
        self.heads.raise_to(self.shared_head.tip)

    def is_null(self, result: bytes | msgspec.Raw) -> bool:
        """Whether a bundler's result is null. Any other result may name a block that is newer than the chain's tip."""
        if len(result) == _NULL_BYTES:
            return True
        if self.chain is not None:
            self.chain.note_block(bytes(result))
        return False

    def note_block(self, result: bytes) -> None:
        """If the result names a block beyond the tip, discard recent replies: they must not contradict it."""
        newest = self.head_reader.newest_block(result)
        if newest is not None and newest > self.heads.tip:
            self.forget_recent()

    # The head

    def observe_heads(self, now: float) -> None:
        change = self.heads.observe(self.group.members, now)
        if change == "reset":
            self.replies.clear()
            self.seen_moves = self.shared_head.moves  # Other workers published it for the chain before the reset.
            if self.shared_cache is not None:
                self.shared_cache.chain = ""
        # Without recent reports of the head there is no telling which replies are recent.
        if change != "still" or not self.hears(now):
            self.forget_recent()

    def hears(self, now: float) -> bool:
        """Whether upstreams have reported their heads lately."""
        return now - self.heads.heard_at < STALE_S

    def saw_block(self, upstream: int, number: str, block_hash: str) -> None:
        """Note an upstream's newest block. Another hash at the same height means that the chain was reorganised."""
        was, self._head_block = self._head_block, (upstream, number, block_hash)
        if was[:2] == (upstream, number) and was[2] != block_hash:
            self.forget_recent()

    def compare_head(self, result: bytes, health: UpstreamHealth, now: float) -> HeadComparison:
        """Compare a result that contains the head with ours, and raise ours if the result is newer."""
        number = self.head_reader.read_number(result)
        return "current" if number is None else self.compare_number(number, health, now)

    def compare_number(self, number: int, health: UpstreamHealth, now: float) -> HeadComparison:
        """The same for a head that was reported in another way."""
        if not self.heads.agreed:
            return "current"
        if self.only is not None:
            if self.heads.tip < number <= HIGHEST:
                self.heads.raise_to(number)
                self.forget_recent()
            return "current"
        if not self.heads.is_plausible(number, now):
            return "future"
        if number < self.heads.tip:
            return "behind"
        if number > health.head:
            health.saw_head(number, now)
        if number > self.heads.tip:
            self.heads.raise_to(number)
            self.forget_recent()
        return "current"

    def head_number(self) -> bytes:
        return self.head_reader.write_number(self.heads.tip)
