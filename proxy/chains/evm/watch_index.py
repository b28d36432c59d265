"""An index of webhooks in the follower's memory, so that the contents of a block find their webhooks by look-up.

A webhook is stored in one table, under the rarest thing that its filter names: addresses before senders, recipients,
tokens and contracts. The contents of a block are looked up there (chains/evm/matching), so the cost depends on the
block and not on the number of webhooks. Webhooks that share one contract, or have no key at all, are sorted by their
minimum value, and those with a higher minimum are skipped. The rest of a filter is checked on the webhooks found. Logs
have a separate index (chains/evm/log_filter).

A table entry is the watcher itself if it is the only one under its key, which is nearly always, and a list otherwise:
a million addresses are a million entries that share their webhooks. A removed webhook is marked and skipped; the
tables are rebuilt when a large part of them is dead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from proxy.chains.evm import log_filter
from proxy.chains.evm.log_filter import LogFilter
from proxy.core.holdings import FUNGIBLE

WatchKind = Literal["activity", "token", "nft", "mined", "log", "internal", "block", "pending"]
Category = Literal["native", "erc20", "erc721", "erc1155"]
Direction = Literal["incoming", "outgoing"]

# The event types of both formats, and the kind of data that each watches.
KINDS: dict[str, WatchKind] = {
    "address_activity": "activity",
    "token_transfer": "token",
    "nft_transfer": "nft",
    "mined_transaction": "mined",
    "log": "log",
    "ADDRESS_ACTIVITY": "activity",
    "MINED_TRANSACTION": "mined",
    "NFT_ACTIVITY": "nft",
    "TOKEN_TRANSFER": "token",
    "INTERNAL_TRANSFER": "internal",
    "NEW_BLOCK": "block",
    "PENDING_TRANSACTION": "pending",
}
CATEGORIES: dict[int, Category] = {FUNGIBLE: "erc20", 721: "erc721", 1155: "erc1155"}
# More pairs of contract and token than these are found by the contract alone.
MOST_PAIRS = 1024
# The least number of bits per address when `AddressBits` are built; they are rebuilt when addresses have fewer than half as
# many. Then about one in this many addresses that are not watched is looked up in vain. More bits would not fit into the
# processor's cache.
SPARSE = 16
# Every pair of bits of a byte. Some occur twice, to fill a table of 32.
PAIRS = bytes((1 << one | 1 << other) for one in range(8) for other in range(one))
PAIRS += PAIRS[: 32 - len(PAIRS)]
# The number of dead entries that are tolerated, however few live ones there are.
FEW_DEAD = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFilter:
    """A webhook's filter without its addresses. Empty members do not restrict."""

    direction: Direction | None = None
    categories: frozenset[str] = frozenset()
    min_value: int = 0
    contracts: frozenset[bytes] = frozenset()
    senders: frozenset[bytes] = frozenset()
    recipients: frozenset[bytes] = frozenset()
    token_ids: frozenset[int] = frozenset()
    tx_hashes: frozenset[str] = frozenset()
    topics: tuple[bytes, ...] = ()
    selectors: frozenset[bytes] = frozenset()
    finality: Literal["included", "safe", "finalized"] = "included"
    confirmations: int = 0
    exclude_spam: bool = False


class Watcher:
    """The parts of a webhook that matching uses. `listed`: whether its filter has a list of addresses, even an empty one."""

    __slots__ = (
        "account",
        "event_type",
        "filter",
        "gone",
        "id",
        "is_active",
        "is_narrow",
        "kind",
        "listed",
        "logs",
        "watched",
    )

    def __init__(
        self,
        webhook_id: str,
        event_type: str,
        wanted: WatchFilter,
        *,
        listed: bool,
        is_active: bool = True,
        account: str = "",
    ) -> None:
        self.id = webhook_id
        self.account = account
        self.event_type = event_type
        self.kind = KINDS[event_type]
        self.filter = wanted
        self.listed = listed
        self.is_active = is_active
        self.gone = False
        # Whether a match has to be checked against its log or its transaction.
        self.is_narrow = bool(
            (self.kind in ("activity", "token", "nft") and wanted.topics)
            or (self.kind in ("token", "nft") and wanted.selectors)
        )
        # The number of addresses it is stored under; if it watches logs, also the addresses and its place in that index.
        self.watched = 0
        self.logs: tuple[set[str], LogFilter | None] = (set(), None)

    def __repr__(self) -> str:
        return f"<Watcher {self.id} {self.event_type}, {self.watched} addresses{', gone' if self.gone else ''}>"


Watchers = Watcher | list[Watcher]
WatchTable = dict[Hashable, Watchers]


def _add(table: WatchTable, key: Hashable, watcher: Watcher) -> None:
    watchers = table.get(key)
    if watchers is None:
        table[key] = watcher
    elif isinstance(watchers, list):
        watchers.append(watcher)
    else:
        table[key] = [watchers, watcher]


def _drop(table: WatchTable, key: Hashable, watcher: Watcher) -> None:
    watchers = table.get(key)
    if watchers is watcher:
        del table[key]
    elif isinstance(watchers, list) and watcher in watchers:
        watchers.remove(watcher)
        if len(watchers) == 1:
            table[key] = watchers[0]


def each_of(watchers: Watchers | None) -> Sequence[Watcher]:
    """The watchers under a key."""
    if watchers is None:
        return ()
    return watchers if isinstance(watchers, list) else (watchers,)


class RankedWatchers:
    """Watchers by their minimum value."""

    __slots__ = ("_least", "_ranked")

    def __init__(self) -> None:
        self._least: list[int] = []
        self._ranked: list[Watcher] = []

    def __len__(self) -> int:
        return len(self._ranked)

    def add(self, watcher: Watcher) -> None:
        place = bisect_right(self._least, watcher.filter.min_value)
        self._least.insert(place, watcher.filter.min_value)
        self._ranked.insert(place, watcher)

    def remove(self, watcher: Watcher) -> None:
        place = self._ranked.index(watcher)
        del self._least[place], self._ranked[place]

    def of(self, value: int) -> Sequence[Watcher]:
        return self._ranked[: bisect_right(self._least, value)]


class AddressBits:
    """Two bits of one byte for each watched address, by its hash. Most addresses in a block are ruled out here, which costs a
    tenth of a lookup in tables of many megabytes. The bits of addresses that are no longer watched stay until a rebuild."""

    __slots__ = ("_count", "bits", "mask")

    def __init__(self, count: int = 0) -> None:
        size = max(128, 1 << (count * SPARSE // 8).bit_length())
        self.bits = bytearray(size)
        self.mask = size - 1
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count * SPARSE > 16 * len(self.bits)

    def add(self, addresses: Iterable[bytes]) -> None:
        bits, mask, count = self.bits, self.mask, 0
        for address in addresses:
            number = hash(address)
            bits[number & mask] |= PAIRS[number >> 40 & 31]
            count += 1
        self._count += count


@dataclass(slots=True)
class WatchTables:
    """The tables that hold a webhook, by kind. `address_bits`: the addresses of all its tables of addresses."""

    address_bits: AddressBits = field(default_factory=AddressBits)
    activity: WatchTable = field(default_factory=dict)
    internal: WatchTable = field(default_factory=dict)
    pending: WatchTable = field(default_factory=dict)
    token_side: WatchTable = field(default_factory=dict)
    token_sender: WatchTable = field(default_factory=dict)
    token_recipient: WatchTable = field(default_factory=dict)
    nft_side: WatchTable = field(default_factory=dict)
    nft_contract: WatchTable = field(default_factory=dict)
    nft_token: WatchTable = field(default_factory=dict)
    mined: WatchTable = field(default_factory=dict)
    token_contract: dict[bytes, RankedWatchers] = field(default_factory=dict)
    tokens: RankedWatchers = field(default_factory=RankedWatchers)
    nfts: dict[str, Watcher] = field(default_factory=dict)
    blocks: dict[str, Watcher] = field(default_factory=dict)
    logs: log_filter.LogFilterIndex = field(default_factory=log_filter.LogFilterIndex)
    logs_of: dict[LogFilter, list[Watcher]] = field(default_factory=dict)

    def add_addresses(self, addresses: Sequence[bytes]) -> None:
        self.address_bits.add(addresses)
        if self.address_bits.is_full:
            self.mark_anew()

    def mark_anew(self) -> None:
        """Rebuilds the bits from the tables."""
        tables = (self.activity, self.internal, self.pending, self.token_side, self.nft_side)
        named = (*tables, self.token_sender, self.token_recipient)
        self.address_bits = AddressBits(sum(map(len, named)))
        for table in named:
            self.address_bits.add(cast("dict[bytes, Watchers]", table))

    def by_address(self, kind: WatchKind) -> WatchTable:
        """The tables that hold a list of addresses."""
        match kind:
            case "activity":
                return self.activity
            case "internal":
                return self.internal
            case "pending":
                return self.pending
            case "token":
                return self.token_side
            case "nft":
                return self.nft_side
            case _:
                raise ValueError(f"{kind} has no table of addresses")


class WatchIndex:
    """All webhooks of one network."""

    def __init__(self) -> None:
        self.tables = WatchTables()
        self._known: dict[str, Watcher] = {}
        self._kinds: Counter[WatchKind] = Counter()
        self._selecting = 0
        self._live = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<WatchIndex {len(self)} webhooks, {self._live} addresses>"

    def find(self, webhook_id: str) -> Watcher | None:
        return self._known.get(webhook_id)

    def has(self, *kinds: WatchKind) -> bool:
        """Whether any webhook watches this kind."""
        return any(self._kinds[kind] for kind in kinds)

    @property
    def has_selectors(self) -> bool:
        """Whether any webhook filters by the function that a transaction calls."""
        return self._selecting > 0

    # Membership

    def put(self, watcher: Watcher) -> None:
        """Adds a webhook, or replaces it; its addresses are added separately."""
        self.remove(watcher.id)
        self._known[watcher.id] = watcher
        self._kinds[watcher.kind] += 1
        self._selecting += bool(watcher.filter.selectors)
        if watcher.kind == "log":
            self._place_log(watcher)
        elif not watcher.listed:
            self._place(watcher)

    def remove(self, webhook_id: str) -> None:
        """Removes it from all tables except those of addresses, where it is skipped from now on."""
        old = self._known.pop(webhook_id, None)
        if old is None:
            return
        self._kinds[old.kind] -= 1
        self._selecting -= bool(old.filter.selectors)
        if old.kind == "log":
            self._unplace_log(old)
        elif not old.listed:
            self._unplace(old)
        old.gone = True
        if old.kind != "log":
            self._live -= old.watched
            self._dead += old.watched
        if self._dead > max(FEW_DEAD, self._live // 4):
            self._sweep()

    def watch(self, webhook_id: str, addresses: Sequence[bytes]) -> None:
        """Add addresses that the webhook does not watch yet."""
        watcher = self._known[webhook_id]
        if watcher.kind == "log":
            self._watch_logs(watcher, watcher.logs[0] | {_text(each) for each in addresses})
            return
        table = self.tables.by_address(watcher.kind)
        for address in addresses:
            _add(table, address, watcher)
        watcher.watched += len(addresses)
        self._live += len(addresses)
        self.tables.add_addresses(addresses)

    def unwatch(self, webhook_id: str, addresses: Iterable[bytes]) -> None:
        """Remove addresses that the webhook watches."""
        watcher = self._known[webhook_id]
        if watcher.kind == "log":
            self._watch_logs(watcher, watcher.logs[0] - {_text(each) for each in addresses})
            return
        table = self.tables.by_address(watcher.kind)
        for address in addresses:
            _drop(table, address, watcher)
            watcher.watched -= 1
            self._live -= 1

    def _sweep(self) -> None:
        """Removes all dead entries from the tables of addresses."""
        for kind in ("activity", "internal", "pending", "token", "nft"):
            table = self.tables.by_address(kind)
            for key, watchers in [*table.items()]:
                left = [each for each in each_of(watchers) if not each.gone]
                if not left:
                    del table[key]
                elif len(left) < len(each_of(watchers)):
                    table[key] = left if len(left) > 1 else left[0]
        self.tables.mark_anew()
        self._dead = 0

    def _keys(self, watcher: Watcher) -> Iterator[tuple[WatchTable, Hashable]]:
        """The tables and keys under which a webhook without an address list is stored, if a match finds it under exactly one
        key."""
        wanted, tables = watcher.filter, self.tables
        match watcher.kind:
            case "mined":
                yield from ((tables.mined, each) for each in wanted.tx_hashes)
            case "token" if wanted.senders:
                yield from ((tables.token_sender, each) for each in wanted.senders)
            case "token" if wanted.recipients:
                yield from ((tables.token_recipient, each) for each in wanted.recipients)
            case "nft" if wanted.token_ids and len(wanted.token_ids) * len(wanted.contracts) <= MOST_PAIRS:
                yield from ((tables.nft_token, (c, t)) for c in wanted.contracts for t in wanted.token_ids)
            case "nft":
                yield from ((tables.nft_contract, each) for each in wanted.contracts)
            case _:
                return

    def _place(self, watcher: Watcher) -> None:
        wanted, tables = watcher.filter, self.tables
        for table, key in self._keys(watcher):
            _add(table, key, watcher)
        if watcher.kind == "token":
            tables.add_addresses([*(wanted.senders or wanted.recipients)])
        match watcher.kind:
            case "block":
                tables.blocks[watcher.id] = watcher
            case "nft" if not wanted.contracts:
                tables.nfts[watcher.id] = watcher
            case "token" if not wanted.senders and not wanted.recipients:
                for contract in wanted.contracts:
                    tables.token_contract.setdefault(contract, RankedWatchers()).add(watcher)
                if not wanted.contracts:
                    tables.tokens.add(watcher)

    def _unplace(self, watcher: Watcher) -> None:
        wanted, tables = watcher.filter, self.tables
        for table, key in self._keys(watcher):
            _drop(table, key, watcher)
        tables.blocks.pop(watcher.id, None)
        tables.nfts.pop(watcher.id, None)
        if watcher.kind == "token" and not wanted.senders and not wanted.recipients:
            for contract in wanted.contracts:
                ranked = tables.token_contract[contract]
                ranked.remove(watcher)
                if not ranked:
                    del tables.token_contract[contract]
            if not wanted.contracts:
                tables.tokens.remove(watcher)

    def _watch_logs(self, watcher: Watcher, addresses: set[str]) -> None:
        self._unplace_log(watcher)
        watcher.logs = addresses, None
        self._place_log(watcher)

    def _place_log(self, watcher: Watcher) -> None:
        addresses, _ = watcher.logs
        watcher.watched = len(addresses)
        if watcher.listed and not addresses:
            return  # It watches no contract at all.
        wanted = LogFilter(log_filter.pack(bytes.fromhex(each[2:]) for each in addresses), watcher.filter.topics)
        watcher.logs = addresses, wanted
        self.tables.logs.add(wanted)
        self.tables.logs_of.setdefault(wanted, []).append(watcher)

    def _unplace_log(self, watcher: Watcher) -> None:
        _, wanted = watcher.logs
        if wanted is None:
            return
        left = self.tables.logs_of[wanted]
        left.remove(watcher)
        if not left:
            del self.tables.logs_of[wanted]
            self.tables.logs.remove(wanted)


def _text(address: bytes) -> str:
    return "0x" + address.hex()
