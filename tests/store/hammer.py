"""A process that executes commands on shared buckets, one JSON line at a time: `python -m tests.store.hammer FD`.

Tests start several of them to simulate workers: real processes on one inherited file.
"""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from proxy.core.limits import BucketRates
from proxy.store.shared_memory import rate_buckets
from proxy.store.shared_memory.rate_buckets import STRIPES, SharedBuckets

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 30.0


class Hammer:
    """Controls such a process from a test."""

    def __init__(self, fd: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.hammer", str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            pass_fds=(fd,),
        )

    def send(self, what: str, **how: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(orjson.dumps([what, how]) + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        # A mutex that is never released must fail this test, not hang the whole run.
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_S), f"no answer within {ANSWER_S} s"
        line = self.process.stdout.readline()
        assert line, f"the process ended: {self.process.wait(5)}"
        return orjson.loads(line)

    def run(self, what: str, **how: Any) -> Any:
        self.send(what, **how)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def take(shared: SharedBuckets, *, slot: int, tries: int, now: float, request_s: float, unit_s: float = 0.0) -> int:
    """Return how many of the tries were granted, all at the same time."""
    return sum(not shared.take(slot, now, request_s, unit_s) for _ in range(tries))


def take_both(shared: SharedBuckets, *, rate: list[int], own: list[int], tries: int, now: float) -> int:
    """The same for an account's limit and a key's: slot, requests and units per second of each."""
    limits = BucketRates(*rate), BucketRates(*own)
    return sum(not shared.take_both(*limits, now, requests=1, units=1) for _ in range(tries))


def take_until(shared: SharedBuckets, *, slot: int, end: float, request_s: float) -> tuple[int, float, float]:
    """Take without pause until the end; return how many were granted, and the times of the first and last try."""
    granted = 0
    first = last = now = time.monotonic()
    while now < end:
        granted += not shared.take(slot, now, request_s, 0.0)
        last, now = now, time.monotonic()
    return granted, first, last


def churn(shared: SharedBuckets, *, slot: int, tries: int, now: float, request_s: float) -> int:
    """Take one and give it back, repeatedly; return how many takes were refused."""
    refused = 0
    for _ in range(tries):
        if shared.take(slot, now, request_s, request_s):
            refused += 1
        else:
            shared.give_back(slot, request_s, request_s)
    return refused


def overstep(shared: SharedBuckets, *, slot: int) -> list[str]:
    """Use an unreserved slot and return the names of the exceptions raised."""
    raised = []
    for act in (lambda: shared.take(slot, 1.0, 0.1, 0.1), lambda: shared.give_back(slot, 0.1, 0.1)):
        try:
            act()
        except IndexError as exc:
            raised.append(type(exc).__name__)
    return raised


def reserve(shared: SharedBuckets, *, slot: int) -> int:
    shared.reserve(slot)
    return shared.bucket_count


def edge(shared: SharedBuckets, *, slot: int) -> float:
    return shared.edge(slot)


def hold(shared: SharedBuckets, *, slot: int) -> str:
    """Lock the slot's mutex like `take` and never unlock it."""
    rate_buckets._lock(shared._locks[slot % STRIPES])
    return "held"


ACTS = {act.__name__: act for act in (take, take_both, take_until, churn, overstep, reserve, edge, hold)}


def main(fd: int) -> None:
    shared = SharedBuckets(fd)
    for line in sys.stdin.buffer:
        what, how = orjson.loads(line)
        sys.stdout.buffer.write(orjson.dumps(ACTS[what](shared, **how)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
