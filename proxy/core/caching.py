"""A cache of replies, bounded in bytes of memory. Pure: the caller says which replies may be cached and for how long.

There are two stores, for the two lifetimes (`proxy/chains/family.py`):

*Recent* replies are valid until the head moves. They are in a plain dict. When the head moves, the whole dict is put aside in
O(1), and later puts free a few of its entries each: dropping half a million at once would block the event loop for 25 ms.

*Kept* replies are valid forever, so there may be millions of them, and the overhead of an entry matters. A dict entry costs 38
to 50 bytes, a key object at least 48, and OrderedDict's links another 100. So the kept store is set-associative, like a
processor's cache: the key picks one of n *sets*, and a set is one record `(keys, owners, result, result, …)`, where `keys` is
the 16-byte keys in one string. `bytes.find` searches it at memory speed; a match that is not at a multiple of 16 is a
coincidence and counts as a miss. An entry costs 25 bytes beside the result's own object, and nothing is ever rehashed. Measured
with 1,000,000 results of 300 bytes: process memory is 1.26 × the results alone (a dict with 16-byte keys: 1.51). Results of 4
to 256 KiB are compressed to about a quarter of their size. A hit also stores the uncompressed result among the recent ones, so
each is decompressed once per head.

A set is ordered by age, the oldest reply first. A hit in the older half of a set moves the reply to the young end. It also puts
the reply among the recent ones, where the next lookup is that of a dict, so the sets are searched for a busy key once per head.
To make room, the oldest reply is evicted from the fuller of two sets: the one that was just written, and the next one in a
rotation through all sets. Choosing between two keeps the sets equally full, which the rotation alone would not.

*Shares.* An entry belongs to the account whose call put it. A full cache evicts the oldest replies of accounts that have more
than their fair share, so one account with very many different calls evicts its own. While recent replies use up their part of
the memory, an account with more than its share of them cannot store more. Accounts are counted in 256 buckets by their hash, so
a few may share a bucket. Hits are not counted, so they cost nothing.

A key is a digest (`key_of`): 16 bytes for the method and its params, whatever their length. Two calls with
the same digest would share a reply, so it is a cryptographic one: Python's own hash has only 64 bits.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, Literal

from msgspec.structs import astuple

from proxy.core import encodings
from proxy.core.bounded import make_room
from proxy.core.reply_sets import NO_REPLIES, ReplySet, reply_at, set_of

Lifetime = Literal["never", "head", "forever"]

KEY_BYTES = 16
# Bounds the memory of the digests that are cached: their number, and the size of a call.
REMEMBERED, SHORT = 8192, 512
# Overhead of an entry beside its result's bytes: the result's object (33 and rounding), its key, its owner, a share of the set.
KEPT_OVERHEAD = 80
# The same for a recent one: the result's object, the key's object, a dict entry at the usual load.
RECENT_OVERHEAD = 165
# Bytes of replies in a set: about 16 of the usual size, so that a search is short.
SET_BYTES = 8192
MAX_SETS = 1 << 17
# The sizes of results that are compressed. Smaller ones save little, and larger ones would delay other calls.
PACKED_FROM, PACKED_TO = 4096, 1 << 18
# The buckets in which accounts are counted, and how many sets are searched for a reply of an account above its share.
OWNERS = 256
SEARCHED_SETS = 8
# The largest reply is the limit divided by LARGEST_PART, so that it evicts no more than that of the others. All recent replies
# together take at most the limit divided by RECENT_PART.
LARGEST_PART = 16
RECENT_PART = 4
# Entries of a dropped dict that each put frees: more than it adds, so that freeing ends, and few, so that no call waits.
FREED_PER_PUT = 8


# Calls repeat, and looking up a digest takes a fraction of the time of computing it.
_digests: Final[dict[bytes, bytes]] = {}
_OWNER_BYTES = [bytes([index]) for index in range(OWNERS)]


def key_of(method: bytes, params: bytes) -> bytes:
    """The key of a call. Params start with a bracket, so no two pairs join to the same bytes."""
    text = method + params
    known = _digests.get(text) if len(text) <= SHORT else None
    return known if known is not None else _new_key(text)


def _new_key(text: bytes) -> bytes:
    key = blake2b(text, digest_size=KEY_BYTES).digest()
    if len(text) <= SHORT:
        make_room(_digests, REMEMBERED)
        _digests[text] = key
    return key


class OwnedBytes:
    """The bytes that accounts have in a store, by the account's bucket."""

    __slots__ = ("_by_owner", "_owners", "_total")

    def __init__(self) -> None:
        self.clear()

    def __repr__(self) -> str:
        return f"<OwnedBytes {self._total} of {self._owners} owners>"

    def clear(self) -> None:
        self._by_owner = [0] * OWNERS
        self._owners = 0
        self._total = 0

    def add(self, bucket: int, size: int) -> None:
        before = self._by_owner[bucket]
        self._by_owner[bucket] = after = before + size
        self._owners += bool(after) - bool(before)
        self._total += size

    def is_uneven(self) -> bool:
        """Whether an owner has more than one and a half times its share."""
        return max(self._by_owner) * self._owners > self._total * 1.5

    def first_above(self, buckets: bytes) -> int:
        """The index of the first owner above its share; negative if there is none."""
        by_owner, owners, total = self._by_owner, self._owners, self._total
        for index, bucket in enumerate(buckets):
            if by_owner[bucket] * owners > total:
                return index
        return -1

    def is_above_share(self, bucket: int) -> bool:
        """Whether the owner has more than an equal share."""
        return self._by_owner[bucket] * self._owners > self._total


def owner_bucket_of(owner: str) -> int:
    return hash(owner) % OWNERS


class ReplyCache:
    """Results by key, at most `limit` bytes of memory in all. One per network: a head is a network's."""

    __slots__ = (
        "_count",
        "_fronts",
        "_hand",
        "_is_uneven",
        "_kept_by",
        "_kept_bytes",
        "_mask",
        "_recent",
        "_recent_by",
        "_recent_bytes",
        "_retired",
        "_retired_bytes",
        "_sets",
        "evictions",
        "hits",
        "limit",
        "misses",
        "moves",
    )

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.moves = 0
        self._mask = _sets_for(limit) - 1
        self._recent: dict[bytes, bytes] = {}
        self._recent_bytes = 0
        self._fronts = 0  # recent entries that are kept ones too
        # Replies that a new head has invalidated, and when; 0.0 for those that were dropped for lack of room.
        self._retired: list[tuple[float, dict[bytes, bytes]]] = []
        self._retired_bytes = 0
        self._sets: list[ReplySet] = [NO_REPLIES] * (self._mask + 1)
        self._kept_bytes = 0
        self._kept_by = OwnedBytes()
        self._is_uneven = False
        self._recent_by = OwnedBytes()
        self._count = 0
        self._hand = 0

    def get(self, key: bytes) -> bytes | None:
        reply = self._recent.get(key)
        if reply is None:
            reply = self._find(key)
            if reply is None:
                self.misses += 1
                return None
        self.hits += 1
        return reply

    def put(self, key: bytes, reply: bytes | memoryview, lifetime: Lifetime, owner: str = "") -> None:
        """Store a result for the account whose call caused it. A result that is already kept forever is not stored again: it
        cannot have changed."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes: use key_of")
        if lifetime == "never" or len(reply) > self.limit // LARGEST_PART:
            return
        result = bytes(reply)  # a view would keep the whole reply of the upstream in memory
        at = hash(key) & self._mask
        if _index_in(self._sets[at], key) >= 0:
            return
        if (old := self._recent.pop(key, None)) is not None:
            self._recent_bytes -= len(old) + RECENT_OVERHEAD
        bucket = owner_bucket_of(owner)
        if lifetime == "head":
            self._put_owned(key, result, bucket)
        else:
            if PACKED_FROM <= len(result) <= PACKED_TO:
                result = encodings.pack(result)
            keys, owners, *results = astuple(self._sets[at])
            self._sets[at] = set_of(keys + key, owners + _OWNER_BYTES[bucket], *results, result)
            self._kept_bytes += len(result) + KEPT_OVERHEAD
            self._kept_by.add(bucket, len(result) + KEPT_OVERHEAD)
            self._count += 1
        self._make_room(at)

    def stale(self, key: bytes, since: float) -> bytes | None:
        """A reply that was invalidated after `since`, if its memory was not freed yet."""
        for retired_at, replies in reversed(self._retired):
            if retired_at >= since and (reply := replies.get(key)) is not None:
                return reply
        return None

    def head_moved(self, now: float = 0.0) -> None:
        """Invalidate all recent replies. A reply to a call that was sent before is invalid as well: callers of `put` compare
        `moves` with its value when the call was sent."""
        self.moves += 1
        self._retire(now)

    def _retire(self, now: float = 0.0) -> None:
        if self._recent:
            self._retired.append((now, self._recent))
            self._retired_bytes += self._recent_bytes
            self._recent = {}
            self._recent_bytes = 0
            self._recent_by.clear()
            self._fronts = 0

    def clear(self) -> None:
        """Drop everything, after a reorganisation below the final height: any reply may be wrong."""
        self.head_moved()
        self._retired.clear()
        self._sets = [NO_REPLIES] * (self._mask + 1)
        self._kept_by.clear()
        self._retired_bytes = self._kept_bytes = self._count = 0

    @property
    def has_recent(self) -> bool:
        return bool(self._recent)

    @property
    def bytes_used(self) -> int:
        """The memory that the replies take, including the overhead of their entries."""
        return self._kept_bytes + self._recent_bytes + self._retired_bytes

    def __len__(self) -> int:
        return self._count + len(self._recent) - self._fronts

    def __repr__(self) -> str:
        return (
            f"<ReplyCache {len(self):,} in {self.bytes_used:,} of {self.limit:,} bytes; "
            f"{self.hits:,} hits, {self.misses:,} misses, {self.evictions:,} evictions>"
        )

    def _find(self, key: bytes) -> bytes | None:
        """Find a kept reply. It becomes young in its set, and is stored among the recent ones for the next lookup."""
        at = hash(key) & self._mask
        replies = self._sets[at]
        if (index := _index_in(replies, key)) < 0:
            return None
        reply = encodings.unpack(reply_at(replies, index))
        if index * 2 * KEY_BYTES < len(replies.keys):
            keys, owners, *results = astuple(replies)
            results.append(results.pop(index))
            owners = owners[:index] + owners[index + 1 :] + owners[index : index + 1]
            self._sets[at] = set_of(keys.replace(key, b"", 1) + key, owners, *results)
        self._fronts += 1
        self._put_recent(key, reply)
        self._make_room(at)
        return reply

    def _put_owned(self, key: bytes, result: bytes, bucket: int) -> None:
        """Put a recent reply, unless there is no room and its owner has more than its share."""
        owned = self._recent_by
        size = len(result) + RECENT_OVERHEAD
        if self._recent_bytes + size > self.limit // RECENT_PART and owned.is_above_share(bucket):
            self.evictions += 1
            return
        owned.add(bucket, size)
        self._put_recent(key, result)

    def _put_recent(self, key: bytes, result: bytes) -> None:
        # A kept reply that is also a recent one is counted twice, in full: the bound holds all the more.
        self._recent[key] = result
        self._recent_bytes += len(result) + RECENT_OVERHEAD
        if self._recent_bytes > self.limit // RECENT_PART:
            self.evictions += len(self._recent) - self._fronts
            self._retire()

    def _make_room(self, at: int) -> None:
        self._free(FREED_PER_PUT)
        while self.bytes_used > self.limit:
            if self._retired:
                self._free(FREED_PER_PUT)
            else:
                self._evict(at)

    def _free(self, count: int) -> None:
        """Free the memory of a few replies that a new head has invalidated, the oldest first."""
        while self._retired and count:
            replies = self._retired[0][1]
            if replies:
                self._retired_bytes -= len(replies.popitem()[1]) + RECENT_OVERHEAD
                count -= 1
            else:
                self._retired.pop(0)

    def _evict(self, at: int) -> None:
        """Evict the oldest reply from the fuller of two sets; if the shares are uneven, one of an owner above its share."""
        sets, hand = self._sets, self._hand
        while not sets[hand].keys:
            hand = (hand + 1) & self._mask
        self._hand = (hand + 1) & self._mask
        if len(sets[at].keys) <= len(sets[hand].keys):
            at = hand
        if not self.evictions & 255:
            self._is_uneven = self._kept_by.is_uneven()
        if not self._is_uneven:
            self._remove(at, 0)
            return
        for candidate in (at, *range(hand, hand + SEARCHED_SETS)):
            index = self._kept_by.first_above(sets[candidate & self._mask].owners)
            if index >= 0:
                self._remove(candidate & self._mask, index)
                return
        self._remove(at, 0)

    def _remove(self, at: int, index: int) -> None:
        keys, owners, *results = astuple(self._sets[at])
        start = index * KEY_BYTES
        key, size = keys[start : start + KEY_BYTES], len(results.pop(index)) + KEPT_OVERHEAD
        keys = keys[:start] + keys[start + KEY_BYTES :]
        self._sets[at] = set_of(keys, owners[:index] + owners[index + 1 :], *results) if results else NO_REPLIES
        self._kept_bytes -= size
        self._kept_by.add(owners[index], -size)
        self._count -= 1
        self._fronts -= key in self._recent
        self.evictions += 1


def _index_in(replies: ReplySet, key: bytes) -> int:
    """The index of the reply in its set; negative if it is absent."""
    at = replies.keys.find(key)
    return -1 if at % KEY_BYTES else at // KEY_BYTES


def _sets_for(limit: int) -> int:
    """A power of two, so that a mask picks the set."""
    return 1 << max(0, min(limit // SET_BYTES, MAX_SETS).bit_length() - 1)
