"""The state of one network in this process: its upstreams, its head, and the replies that are true at that head.

Replies are cached for ever or until the head moves. A new head, a reorganisation or a write makes recent replies out of date,
here and in the other workers of the host, which learn of it through the shared head. Recent replies are bound to the hash of
the block that they were read at: while only its number is known, they are discarded when its hash is first reported.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, MutableSequence, Sequence
from typing import Final, Literal, Protocol

import msgspec

from proxy.chains.family import FIRST, BlockRef, HeadReader
from proxy.chains.lookups import ReportedBlock
from proxy.chains.registry import Network
from proxy.core.caching import ReplyCache
from proxy.core.directives import Directives
from proxy.core.heads import HIGHEST, STALE_S, Branch, NetworkHead, RecentHashes, heard_of, short_hash_of
from proxy.core.jsonrpc import NULL
from proxy.core.routing import USUAL_COSTS, CostPolicy, UpstreamGroup
from proxy.core.upstream_health import UpstreamHealth
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.recent_writes import NO_NOTE, RecentWrites
from proxy.services.rpc.shared_cache import SharedCache
from proxy.wire.upstream import Upstream

_NULL_BYTES = len(NULL)
# How a head that an upstream reports compares with ours.
HeadComparison = Literal["current", "behind", "future"]


# A larger result is not kept. Those of clients are passed on while they arrive, and our own calls rarely ask for it again.
LARGEST_KEPT: Final = 1 << 20
# The numbers of a network's `SharedHead`, without the holder of the tip.
HEAD_NUMBERS: Final = 4
# A holder is one number with the last bits of its tip: it is of no use for another tip, whoever writes at the same time.
TIP_BITS: Final = 0xFFFF
ID_BITS: Final = (1 << 47) - 1


class SharedHead:
    """The head of one network in the memory that a host's workers share: the tip, a counter of moves, a short form of the tip's
    hash (0 if it is unknown), a counter of the times that the tip went back, and an upstream that has the tip.

    A client's next request may reach another worker. So a worker that learns of a new head, or has sent a write, increments the
    counter; a worker that sees another count than its own discards its recent replies before it replies. Two workers that
    increment at once may count once: the number still differs from the one before.
    """

    __slots__ = ("_holders", "_index", "_memory", "_place")

    def __init__(
        self,
        memory: MutableSequence[int] | memoryview[int],
        holders: MutableSequence[int] | memoryview[int],
        place: int,
    ) -> None:
        self._memory = memory
        self._holders = holders
        self._place = place
        self._index = HEAD_NUMBERS * place

    @property
    def tip(self) -> int:
        return self._memory[self._index]

    @property
    def moves(self) -> int:
        return self._memory[self._index + 1]

    @property
    def short_hash(self) -> int:
        return self._memory[self._index + 2]

    @property
    def returns(self) -> int:
        return self._memory[self._index + 3]

    @property
    def holder(self) -> int:
        """An upstream that has the tip, as `holder_of` names it; 0 if none is known."""
        packed = self._holders[self._place]
        return packed >> 16 if packed & TIP_BITS == self.tip & TIP_BITS else 0

    def publish(self, tip: int, short_hash: int = 0, *, is_lower: bool = False, holder: int = 0) -> int:
        self._holders[self._place] = holder << 16 | tip & TIP_BITS
        self._memory[self._index] = tip
        self._memory[self._index + 2] = short_hash
        if is_lower:
            self._memory[self._index + 3] += 1
        self._memory[self._index + 1] = moves = self._memory[self._index + 1] + 1
        return moves


def holder_of(upstream_id: str) -> int:
    """The number by which an upstream is known as the holder of a tip."""
    return int(upstream_id, 16) & ID_BITS if upstream_id else 0


class FleetHeads(Protocol):
    """Shares what this host learns with other hosts."""

    def moved(self, network: str, tip: int, short_hash: int, *, is_lower: bool, holder: int) -> None: ...
    def wrote(self, network: str, note: str, then: Callable[[], None]) -> None: ...


class ReadObserver(ABC):
    """Sees the reads that upstreams have answered, after their replies were delivered. No protocol: calls of a base class's
    methods are compiled, and each read makes one."""

    @abstractmethod
    def wants_next(self) -> bool:
        """A read begins on the short path. Returns whether this observer must see its reply."""

    @abstractmethod
    def short_answered(
        self, account: str, policy: MethodPolicy, params: bytes, reply: bytes, upstream: Upstream, took_s: float
    ) -> None: ...

    @abstractmethod
    def answered(self, flight: Flight, reply: bytes, *, is_error: bool = False) -> None: ...


class NetworkState:
    __slots__ = (
        "_branch",
        "_hashed_tip",
        "_noted_at",
        "_seen_returns",
        "_short_hash",
        "archive_minimum",
        "caches",
        "chain",
        "every_upstream",
        "exchange",
        "flights",
        "floor",
        "group",
        "hashes",
        "head_reader",
        "heads",
        "methods",
        "network",
        "network_id",
        "old_data",
        "on_doubt",
        "only",
        "read_observers",
        "reorgs",
        "replies",
        "seen_moves",
        "shared_cache",
        "shared_head",
        "streams",
        "tip",
        "tip_lines",
        "upstreams",
        "writes",
    )

    def __init__(
        self,
        network: Network,
        upstreams: Sequence[Upstream],
        heads: NetworkHead,
        head_reader: HeadReader,
        replies: ReplyCache,
        shared_head: SharedHead,
        *,
        caches: bool,
        archive_minimum: int,
        streams: Sequence[Upstream] = (),
        shared_cache: SharedCache | None = None,
        exchange: FleetHeads | None = None,
        writes: RecentWrites | None = None,
        chain: NetworkState | None = None,
        methods: Collection[str] = (),
        costs: CostPolicy = USUAL_COSTS,
    ) -> None:
        """`archive_minimum`: the lowest price of a read of old state. `streams`: upstreams that carry subscriptions and no
        calls. `shared_cache`: replies that other workers and hosts have cached. `exchange`: shares heads and writes with other
        hosts. `writes`: which upstream has received them, if there are several. `chain`: for bundlers, the state of the chain
        that they serve. `methods`: those that upstreams of the network may have. `costs`: how their costs count."""
        self.network = network
        self.network_id = network.id
        self.upstreams = tuple(upstreams)
        self.streams = tuple(streams)
        self.every_upstream = (*self.upstreams, *self.streams)
        self.archive_minimum = archive_minimum
        self.group = UpstreamGroup([upstream.health for upstream in upstreams], costs)
        self.only = self.upstreams[0] if len(self.upstreams) == 1 else None
        self.heads, self.head_reader = heads, head_reader
        self.replies, self.caches = replies, caches
        self.shared_head = shared_head
        self.seen_moves = 0
        self.shared_cache = shared_cache
        self.exchange = exchange
        self.writes = writes
        self.chain = chain
        self.methods = methods
        # Flights that the same call may join, by cache key.
        self.flights: dict[bytes, Flight] = {}
        # How often blocks were replaced: a result that is joined from several replies must not span a replacement.
        self.reorgs = 0
        # From this block on, every upstream has all data, as far as is known. Calls about older blocks are routed by bounds.
        self.floor = 0
        # The kinds of data of which clients have read old blocks, as a bit set: only their bounds are worth a search.
        self.old_data = 0
        # Those that compare replies of clients with those of others.
        self.read_observers: tuple[ReadObserver, ...] = ()
        # The tip: a copy, because `heads` is not compiled.
        self.tip = 0
        # Header lines of replies whose state has reached the tip, by how they were found. The front prepares them.
        self.tip_lines: dict[str, bytes] = {}
        # Called when an upstream sends an older head than it had: the chain may have gone back.
        self.on_doubt: list[Callable[[], None]] = []
        self._branch = Branch()
        # The blocks that upstreams have reported lately.
        self.hashes = RecentHashes()
        self._noted_at = 0.0
        # The block that recent replies were read at: its number, and the short form of its hash, 0 while that is unknown.
        self._hashed_tip, self._short_hash = 0, 0
        self._seen_returns = shared_head.returns

    def __repr__(self) -> str:
        return f"{self.network_id}: {len(self.upstreams)} upstreams, {self.heads!r}"

    def price(self, policy: MethodPolicy, params: bytes) -> int:
        """The list price of a call. A read of old state costs at least the archive price."""
        if policy.is_plain or policy.names_latest(params):
            return policy.units
        family = policy.family
        if policy.units < self.archive_minimum and not policy.method.history and self.heads.tip:
            ref = family.block_ref(policy.method, params)
            if ref.block_hash:
                # A block that no upstream has reported lately counts as old.
                number = self.hashes.number_of(ref.block_hash)
                ref = FIRST if number is None else BlockRef("number", number)
            if family.is_archive(ref, self.heads.tip):
                return self.archive_minimum
        return policy.units

    def price_of_all(self, policy: MethodPolicy, params: bytes, directives: Directives | None = None) -> int:
        """The list price of all calls that are made for one: several for a verified reply, or for a pending nonce."""
        units = self.price(policy, params)
        if directives is not None:
            units *= directives.price_factor
        return units * policy.most_asked if policy.takes_highest(params, directives) else units

    # Replies

    def observe_reads(self, observers: Iterable[ReadObserver]) -> None:
        """Let these see the reads of clients from now on."""
        self.read_observers = (*self.read_observers, *observers)

    def is_sampled(self) -> bool:
        """A read begins on the short path, which keeps nothing. Returns whether an observer must see its reply."""
        wanted = False
        for observer in self.read_observers:
            wanted |= observer.wants_next()
        return wanted

    def short_read_answered(
        self, account: str, policy: MethodPolicy, params: bytes, reply: bytes, upstream: Upstream, took_s: float
    ) -> None:
        """A read for which `is_sampled` was true was answered on the short path."""
        for observer in self.read_observers:
            observer.short_answered(account, policy, params, reply, upstream, took_s)

    def register(self, flight: Flight) -> None:
        """Let the same call of others join the flight."""
        if flight.call.cache_key is not None:
            self.flights[flight.call.cache_key] = flight

    def unregister(self, flight: Flight) -> None:
        """The flight can no longer be joined."""
        key = flight.call.cache_key
        if key is not None and self.flights.get(key) is flight:
            del self.flights[key]

    def keep(self, flight: Flight, result: bytes | msgspec.Raw) -> None:
        """Cache a result for as long as it is true. A write makes recent replies out of date."""
        policy = flight.policy
        if policy.method.kind == "write":
            if flight.answered_by is not None:
                flight.answered_by.health.write_succeeded()
            self.forget_recent()
            return
        key = flight.call.cache_key
        if key is None or not self.caches or not self.heads.tip:
            return
        if flight.answered_by is not None and flight.answered_by.health.standing != "good":
            return  # It was found to be on another branch while the call was under way.
        if len(result) > LARGEST_KEPT and not policy.shows_block:
            return
        raw = bytes(result)
        if policy.shows_block:
            self.note_block(raw, flight.answered_by)
        ref = policy.family.block_ref(policy.method, flight.params)
        # A block that became final while the call was under way may have been read on a branch that was replaced meanwhile.
        final = min(self.heads.final, flight.block - self.heads.finality_blocks)
        lifetime = policy.family.lifetime(policy.method, flight.params, raw, ref, self.heads.tip, final)
        if lifetime == "forever" or (lifetime == "head" and self._is_current(flight, ref)):
            self.replies.put(key, raw, lifetime, flight.client)
            if lifetime == "forever" and self.shared_cache is not None:
                self.shared_cache.put(key, raw)

    def note_write(self, flight: Flight) -> str:
        """Note which upstream has received a write. Returns the note for other hosts."""
        if self.writes is None or flight.answered_by is None:
            return NO_NOTE
        return self.writes.took(flight.answered_by, flight.policy, flight.params, flight.client)

    def follow_write(self, note: str) -> None:
        """Another host has sent a write."""
        if self.writes is not None and note != NO_NOTE:
            self.writes.heard(note)
        self.discard_recent()

    def _is_current(self, flight: Flight, ref: BlockRef) -> bool:
        """Whether a result was read at our head. A call that names no block is answered at the head of its upstream."""
        if flight.moves != self.replies.moves:
            return False
        upstream = flight.answered_by
        if self.only is not None or upstream is None or ref.kind == "number" or ref.kind == "hash":
            return True
        return upstream.health.head >= self.heads.tip and not upstream.health.ahead

    def forget_recent(self, *, is_lower: bool = False) -> None:
        """Discard replies that depend on the head: here, in every other worker, and on other hosts if the head is news to
        this one. `is_lower`: the tip has gone back."""
        before = self.shared_head.tip, self.shared_head.short_hash
        self.discard_recent(is_lower=is_lower)
        if self.exchange is not None and (is_lower or before != (self.shared_head.tip, self.shared_head.short_hash)):
            shared = self.shared_head
            self.exchange.moved(self.network_id, shared.tip, shared.short_hash, is_lower=is_lower, holder=shared.holder)

    def discard_recent(self, *, is_lower: bool = False) -> None:
        """The same, on this host only."""
        if self.shared_head.moves != self.seen_moves and not is_lower:
            # Another worker may have published a newer block meanwhile: do not overwrite it with an older one.
            self._take_shared_tip()
        self.replies.head_moved(time.monotonic())
        self.flights.clear()
        short_hash = self._short_hash if self._hashed_tip == self.heads.tip else 0
        self.seen_moves = self.shared_head.publish(self.heads.tip, short_hash, is_lower=is_lower, holder=self._holder())
        self._seen_returns = self.shared_head.returns
        self._note_tip()

    def follow(self, tip: int, short_hash: int, *, is_lower: bool, holder: int = 0) -> None:
        """Another host has learned of this head, or of a reorganisation."""
        self.stay_current()
        if not is_lower:
            self._note_holder(holder, tip)
        is_known = tip < self.heads.tip or (tip == self.heads.tip and short_hash in (0, self.shared_head.short_hash))
        if is_known and not (is_lower and tip < self.heads.tip):
            return
        if is_lower:
            self._go_back_to(tip)
        else:
            self._advance_to(tip)
        if short_hash:
            self._hashed_tip, self._short_hash = tip, short_hash
        self.discard_recent(is_lower=is_lower)

    def stay_current(self) -> None:
        """Discard recent replies if another worker learned of a write or of a new head before this one."""
        if self.shared_head.moves != self.seen_moves:
            self.catch_up()

    def catch_up(self) -> None:
        self.seen_moves = self.shared_head.moves
        self.replies.head_moved(time.monotonic())
        self.flights.clear()
        self._take_shared_tip()
        self._note_tip()

    def _note_tip(self) -> None:
        if self.tip != self.heads.tip:
            self.tip = self.heads.tip
            self.tip_lines = {}

    def _take_shared_tip(self) -> None:
        shared = self.shared_head
        if shared.returns != self._seen_returns:
            self._seen_returns = shared.returns
            self._go_back_to(shared.tip)
        else:
            self._note_holder(shared.holder, shared.tip)
            self._advance_to(shared.tip)
        if self.heads.tip == shared.tip and shared.short_hash:
            self._hashed_tip, self._short_hash = shared.tip, shared.short_hash

    def _go_back_to(self, tip: int) -> None:
        self._branch.clear()
        self.reorgs += 1
        self.heads.lower_to(tip, self.group.members, time.monotonic())

    def _advance_to(self, tip: int) -> None:
        if self.only is not None and self.heads.agreed and tip > self.heads.tip:
            # Other workers and hosts have it from the same upstream.
            self.only.health.saw_head(tip, time.monotonic())
        self.heads.raise_to(tip)

    def _holder(self) -> int:
        """An upstream that has the tip; 0 if none of ours is known to."""
        for member in self.group.members:
            if member.head >= self.heads.tip and not member.ahead:
                return holder_of(member.upstream_id)
        return 0

    def _note_holder(self, holder: int, tip: int) -> None:
        """Another process has learned that this upstream has the block. Without it, the next call at `latest` could go to an
        upstream that has only older ones."""
        if not holder or tip < self.heads.tip:
            return
        for member in self.group.members:
            if member.head < tip and holder_of(member.upstream_id) == holder:
                member.saw_head(tip, time.monotonic())

    def is_null(self, result: bytes | msgspec.Raw) -> bool:
        """Whether a bundler's result is null. Any other result may name a block that is newer than the chain's tip."""
        if len(result) == _NULL_BYTES:
            return True
        if self.chain is not None:
            self.chain.note_block(bytes(result))
        return False

    def note_block(self, result: bytes, upstream: Upstream | None = None) -> None:
        """If the result names a block beyond the tip, discard recent replies: they must not contradict it. The upstream that
        sent the result has that block."""
        newest = self.head_reader.newest_block(result)
        if newest is None or newest <= self.heads.tip:
            return
        if upstream is None or self.compare_number(newest, upstream.health, time.monotonic()) != "current":
            self.forget_recent()

    # The head

    def observe_heads(self, now: float, *, is_newer: bool = False) -> None:
        """Take the heads that upstreams have reported into account. `is_newer`: the tip was raised already."""
        change = self.heads.observe(self.group.members, now)
        self.note_bounds()
        if change == "reset":
            self.replies.clear()
            self._branch.clear()
            if self.shared_cache is not None:
                self.shared_cache.identified("")
        is_replaced = self._note_blocks(now)
        self.reorgs += is_replaced or change == "lowered" or change == "reset"
        is_other = self._mark_tip()
        # Without recent reports of the head it is not known which replies are recent.
        if is_newer or is_replaced or is_other or change != "still" or not self.hears(now):
            self.forget_recent(is_lower=change == "lowered" or change == "reset")

    def head_reported(self, health: UpstreamHealth, block: ReportedBlock, now: float, *, asked_at: float) -> None:
        """An upstream has answered a poll. It is taken into account when all have: see `observe_heads`."""
        if health.has_moved_since(asked_at, block[0]):
            return
        health.saw_head(block[0], now, block[1], block[2])
        if self.only is None:
            self.heads.place(health, now)

    def old_data_read(self, data: int) -> None:
        """A client reads old data of this kind."""
        self.old_data |= 1 << data

    def note_bounds(self) -> None:
        """Bounds of upstreams were found, or have moved with their heads."""
        self.floor = max([member.bounds.highest(member.head) for member in self.group.members])

    def oldest_block(self, data: int) -> int:
        """The oldest block of which any upstream has this kind of data. `data`: the index of the kind."""
        return min([member.bounds.oldest(data, member.head) for member in self.group.members])

    def announce(self, block: ReportedBlock, health: UpstreamHealth, now: float) -> None:
        """An upstream has announced a block without being asked, and clients may have received it."""
        number, block_hash, parent_hash = block
        if not self.heads.agreed or not 0 < number <= HIGHEST or not self.heads.is_plausible(number, now):
            return
        if number < health.head:
            self._doubt()
        health.saw_head(number, now, block_hash, parent_hash)
        is_newer = health.standing == "good" and number > self.heads.tip
        if is_newer:
            self.heads.raise_to(number)
        self.observe_heads(now, is_newer=is_newer)

    def distrust(self) -> None:
        """An upstream that replies came from is of another chain or branch: nothing that was cached is known to be true, and
        the tip may be its block."""
        self.reorgs += 1
        self.replies.clear()
        if self.shared_cache is not None:
            self.shared_cache.forget_recent()
        tip = max([member.head for member in self.group.members if member.standing == "good"], default=0)
        is_lower = 0 < tip < self.heads.tip
        if is_lower:
            self.heads.lower_to(tip, (), time.monotonic())
        self.forget_recent(is_lower=is_lower)

    def _note_blocks(self, now: float) -> bool:
        """Compare new reports with the branch. Returns whether a block was replaced."""
        is_replaced = False
        for member in self.group.members:
            if (
                member.standing == "good"
                and member.head_hash
                and not member.lagging
                and member.head_at > self._noted_at
            ):
                is_replaced |= self._branch.note(member.head, member.head_hash, member.parent_hash)
                self.hashes.note(member.head, member.head_hash)
                if member.parent_hash:
                    self.hashes.note(member.head - 1, member.parent_hash)
        self._noted_at = now
        return is_replaced

    def _mark_tip(self) -> bool:
        """Bind recent replies to the hash of the tip. Returns whether they may have been read at another block."""
        tip = self.heads.tip
        at_tip = [member for member in heard_of(self.group.members, self._noted_at) if member.head == tip]
        reports = [(member.head_at, member.head_hash) for member in at_tip if member.head_hash and not member.silent]
        short_hash = short_hash_of(max(reports)[1]) if reports else 0
        was = self._short_hash if self._hashed_tip == tip else 0
        if short_hash:
            self._hashed_tip, self._short_hash = tip, short_hash
        return short_hash != 0 and short_hash != was

    def hears(self, now: float) -> bool:
        """Whether upstreams have reported their heads lately."""
        return now - self.heads.heard_at < STALE_S

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
                health.saw_head(number, now)
                self.heads.raise_to(number)
                self.forget_recent()
            elif number < self.heads.tip:
                self._doubt()
            return "current"
        if not self.heads.is_plausible(number, now):
            return "future"
        if number < self.heads.tip:
            if number < health.head:
                self._doubt()
            return "behind"
        if number > health.head:
            health.saw_head(number, now)
        if number > self.heads.tip:
            self.heads.raise_to(number)
            self.forget_recent()
        return "current"

    def _doubt(self) -> None:
        for on_doubt in self.on_doubt:
            on_doubt()

    def head_number(self) -> bytes:
        return self.head_reader.write_number(self.heads.tip)
