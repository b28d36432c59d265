"""One customer beside a hostile one: failures and p99 of steady calls, alone and during each attack of `tools/attack.py`.

The attack runs in the scheduler's idle class, on the core of the load generator and the stub: it gets the time that these
leave, which is most of the core, and never delays them. So the figure is about the service, and not about a busy client.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.loaders import Sample, Target
from bench.sockets import Tool

TOOL = Path(__file__).parent / "tools" / "attack.py"
TITLES = {
    "malformed": "50 malformed calls a second",
    "pipelined": "requests sent ahead without end on one connection",
    "refused": "calls above the rate limit on 64 connections, each after the reply to the one before",
    "keys": "calls with an unknown key on 64 connections, each after the reply to the one before",
    "churn": "64 clients that make a new connection for each call",
    "chunks": "bodies of one-byte chunks on three connections, without a key",
    "fragments": "a WebSocket message of empty fragments without end",
    "batches": "batches of 1,000 calls on four connections",
    "huge": "batches of 40 calls with results of 20 MB each",
    "readers": "66 readers of 30 MB results at 3 KB every 5 s",
    "database": "200 reads from the database at once, every second",
    # By one account with the plan Free, at the rate of its plan.
    "containers": "webhooks with 8 MB of empty arrays",
    "wallets": "wallets with 1 MB of empty arrays",
    "replays": "16 subscriptions from an old block on one socket",
    "nul": "calls with U+0000 in a name",
    "subscriptions": "400 subscriptions with the largest filters",
    "junk-filters": "filters of 1 MB of junk",
    "ranges": "logs of 10,000 blocks from an upstream that answers 10",
    "back-tests": "back-tests over 20 blocks of 300 transactions",
    "receivers": "webhooks whose receiver never answers",
    "programs": "300 subscriptions to programs on a polled network",
    "addresses": "webhooks with 99,999 addresses, created and deleted",
    "traces": "back-tests over 50 traced blocks",
    "crowd": "100 accounts together, with all of these inputs in turn",
}
CROWD = "crowd"
# Attacks of Free accounts.
FREE = frozenset(
    {
        "containers", "wallets", "replays", "nul", "subscriptions", "junk-filters", "ranges", "back-tests", "receivers",
        "programs", "addresses", "traces", CROWD,
    }
)  # fmt: skip
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The good account's calls without and beside one attack, by round, and the growth of the worker's memory."""

    name: str
    alone: Sequence[Sample]
    beside: Sequence[Sample]
    growth_mib: Sequence[float]
    # Replies to the attack, by status, if it sends one input after the other.
    replies: Mapping[str, int]

    @property
    def failures(self) -> int:
        return sum(sample.faults + sample.late for sample in self.beside)

    @property
    def ratio(self) -> float:
        """The median over rounds: each round compares with its own calls without the attack."""
        return median(b.p99_us / a.p99_us for a, b in zip(self.alone, self.beside, strict=True))

    def row(self) -> tuple[str, ...]:
        calls = sum(sample.requests for sample in self.beside)
        p99s = (median(sample.p99_us for sample in samples) for samples in (self.alone, self.beside))
        return (
            self.name,
            f"{calls:,}",
            f"{self.failures:,}",
            *(f"{p99:,.0f}" for p99 in p99s),
            f"{self.ratio:.2f}",
            f"{max(sample.max_us for sample in self.beside) / 1000:,.1f}",
            f"{max(self.growth_mib):.1f}",
            " ".join(f"{count:,} × {status}" for status, count in sorted(self.replies.items())) or "-",
        )


HEADS = (
    "attack",
    "calls",
    "failures",
    "p99 alone µs",
    "p99 µs",
    "÷ alone",
    "max ms",
    "growth MiB",
    "replies to the attack",
)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [HEADS, *(outcome.row() for outcome in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *figures = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join(("", name.strip().ljust(widths[0]), *figures))


def keys_for(name: str, target: Target) -> Sequence[str]:
    """The keys of the attacking accounts."""
    if name not in FREE:
        return (target.other_key,)
    return target.free_keys if name == CROWD else target.free_keys[:1]


@contextmanager
def under_way(name: str, target: Target, cpu: int, replies: Counter[str]) -> Iterator[None]:
    """Run the attack with a key of another account, and add what it was answered to `replies`."""
    tool = Tool(
        [
            "chrt",
            "--idle",
            "0",
            sys.executable,
            str(TOOL),
            name,
            target.host,
            str(target.port),
            target.path,
            *keys_for(name, target),
        ],
        cpu,
    )
    try:
        tool.line()
        time.sleep(SETTLE_S)
        yield
        replies.update(tool.request())
    finally:
        tool.stop()
