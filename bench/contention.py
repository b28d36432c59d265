"""The memory that the workers of a host share, under contention: `python -m bench.contention`.

1, 2, 4 and 8 processes stand for workers. Each does what a call does with the shared memory: it takes from two buckets and
reads the counter of a network's heads, which one more process increments a hundred times a second. There are three loads:

- *apart*: each worker serves separate accounts, as fast as it can
- *one account*: all workers serve the same account, as fast as they can: the worst case
- *calls*: all workers serve the same account, and compute for as long as a call takes after each

*CPU* is the time per admission of a worker; for *calls*, with all that it computes. *waited* is the share of admissions that
took longer than LONG_US, and *longest* the longest one: a worker that holds a mutex may lose its core. More workers than cores
make that more frequent than it is on a host with a core for each.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.synchronize import Barrier
from typing import Literal

from proxy import compiled
from proxy.services.rpc.network_state import HEAD_NUMBERS, SharedHead
from proxy.store.shared_memory import host_memory, rate_buckets
from proxy.store.shared_memory.host_memory import HostMemory

WORKERS = (1, 2, 4, 8)
SECONDS = 1.0
BLOCKS_PER_S = 100
LIMIT_S = 60.0  # for one measurement on a busy machine
LONG_US = 50
# About 20 µs of computation, as long as a small call takes.
WORK = bytes(16_000)
# Slots between two accounts, so that they share neither a mutex nor a cache line.
APART = 9
# A rate that refuses nothing.
COST_S = 1e-9

Load = Literal["apart", "one account", "calls"]


@dataclass(frozen=True, slots=True)
class Contention:
    load: Load
    workers: int
    cpu_us: float
    waited: float
    longest_us: float

    def __str__(self) -> str:
        return (
            f"{self.load:<12} {self.workers} workers: CPU {self.cpu_us:5.2f} µs, "
            f"waited {100 * self.waited:6.3f} %, longest {self.longest_us:9,.0f} µs"
        )


def figures() -> Iterator[Contention]:
    loads: tuple[Load, ...] = ("apart", "one account", "calls")
    for load in loads:
        for workers in WORKERS:
            yield _measure(load, workers)


def _measure(load: Load, workers: int) -> Contention:
    """Run the workers at the same time on the same memory."""
    context = multiprocessing.get_context("fork")
    fd, barrier, found = rate_buckets.create(), context.Barrier(workers), context.Queue()
    memory = HostMemory(host_memory.create())
    head = SharedHead(memory.heads(HEAD_NUMBERS), memory.holders(1), 0)
    miner = context.Process(target=_mine, args=(head,), daemon=True)
    crew = [
        context.Process(
            target=lambda place: found.put(_admit(fd, head, barrier, load, place)), args=(place,), daemon=True
        )
        for place in range(workers)
    ]
    for process in (miner, *crew):
        process.start()
    times = [found.get(timeout=LIMIT_S) for _ in crew]
    for process in crew:
        process.join()
    miner.terminate()
    miner.join()
    os.close(fd)
    cpu_us, waited, longest_us = zip(*times, strict=True)
    return Contention(load, workers, sum(cpu_us) / workers, sum(waited) / workers, max(longest_us))


def _mine(head: SharedHead) -> None:
    while True:
        head.publish(head.tip + 1)
        time.sleep(1 / BLOCKS_PER_S)


def _admit(fd: int, head: SharedHead, barrier: Barrier, load: Load, place: int) -> tuple[float, float, float]:
    """The CPU time of an admission in µs, the share of those that waited, and the longest in µs."""
    shared = rate_buckets.SharedBuckets(fd)
    slot = place * APART if load == "apart" else 0
    work = _work if load == "calls" else _nothing
    barrier.wait()
    calls = waited = moves = 0
    longest = 0.0
    cpu, until = time.process_time(), time.monotonic() + SECONDS
    while (now := time.monotonic()) < until:
        shared.take(slot, now, COST_S, COST_S)
        moves += head.moves & 1
        took = time.monotonic() - now
        longest = max(longest, took)
        waited += took * 1e6 > LONG_US
        calls += 1
        work()
    cpu = time.process_time() - cpu
    return 1e6 * cpu / calls, waited / calls, 1e6 * longest


def _work() -> None:
    blake2b(WORK).digest()


def _nothing() -> None:
    pass


def main() -> int:
    print(f"{os.cpu_count()} cores; the hot path is {'' if compiled.in_use() else 'not '}compiled; {SECONDS:g} s each")
    for each in figures():
        print(each, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
