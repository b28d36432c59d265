"""One customer beside a hostile one: failures and p99 of steady calls, alone and during each attack of `tools/attack.py`.

The attack runs in the scheduler's idle class, on the core of the load generator and the stub: it gets the time that these
leave, which is most of the core, and never delays them. So the figure is about the service, and not about a busy client.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.loaders import Target
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
}
SETTLE_S = 0.5


@contextmanager
def under_way(name: str, target: Target, cpu: int) -> Iterator[None]:
    """Run the attack with a key of another account."""
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
            target.other_key,
        ],
        cpu,
    )
    try:
        tool.line()
        time.sleep(SETTLE_S)
        yield
    finally:
        tool.stop()
