"""Webhook matching: one block matched against few and against many watched addresses, in this process."""

import gc
import random
import time

from proxy.chains.evm.matching import Match, MatchBlock, MatchTransaction, matched
from proxy.chains.evm.watch_index import Watcher, WatchFilter, WatchIndex
from proxy.core.holdings import FUNGIBLE, Transfer

MANY, FEW = "a million addresses", "a thousand addresses"
# Addresses, and the webhooks that watch them.
SIZES = {FEW: (1_000, 1_000), MANY: (1_000_000, 10_000)}
TRANSACTIONS, TRANSFERS = 1_500, 3_500
# The number of watched addresses among the ten thousand that a block contains.
WATCHED = 20
BLOCKS = 20


def rounds(count: int) -> dict[str, list[float]]:
    """Return milliseconds per block by size and round: the best of several, since other work can only add time."""
    chance = random.Random(8)
    indexes = {name: _index(chance, *size) for name, size in SIZES.items()}
    gc.collect()
    gc.freeze()
    found: dict[str, list[float]] = {name: [] for name in SIZES}
    try:
        for _ in range(count):
            for name, (index, addresses) in indexes.items():
                blocks = [_block(chance, addresses) for _ in range(BLOCKS)]
                found[name].append(min(_milliseconds(index, block) for block in blocks))
    finally:
        gc.unfreeze()
    return found


def _index(chance: random.Random, addresses: int, webhooks: int) -> tuple[WatchIndex, list[bytes]]:
    index = WatchIndex()
    watched = [chance.randbytes(20) for _ in range(addresses)]
    share = addresses // webhooks
    for number in range(webhooks):
        watcher = Watcher(f"wh_{number}", "address_activity", WatchFilter(), listed=True)
        index.put(watcher)
        index.watch(watcher.id, watched[number * share : (number + 1) * share])
    return index, watched


def _block(chance: random.Random, watched: list[bytes]) -> MatchBlock:
    count = 2 * (TRANSACTIONS + TRANSFERS)
    named = [*chance.sample(watched, WATCHED), *(chance.randbytes(20) for _ in range(count - WATCHED))]
    chance.shuffle(named)
    pairs = list(zip(named[::2], named[1::2], strict=True))
    token = chance.randbytes(20)
    return MatchBlock(
        [
            MatchTransaction(f"0x{index:064x}", index, *pair, 1, 0, b"")
            for index, pair in enumerate(pairs[:TRANSACTIONS])
        ],
        [
            Transfer(FUNGIBLE, token, *pair, 1, 0, f"0x{index:064x}", index)
            for index, pair in enumerate(pairs[TRANSACTIONS:])
        ],
    )


def _milliseconds(index: WatchIndex, block: MatchBlock) -> float:
    began = time.perf_counter()
    found: list[Match] = matched(index.tables, block)
    took_s = time.perf_counter() - began
    assert len(found) == WATCHED, f"matched {len(found)} of {WATCHED}"
    return took_s * 1000
