"""One customer beside a hostile one: failures and p99 of steady calls, alone and during each attack of `tools/attack.py`."""

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
    "chunks": "bodies of one-byte chunks on three connections, without a key",
    "fragments": "a WebSocket message of empty fragments without end",
    "batches": "batches of 1,000 calls on four connections",
    "database": "200 reads from the database at once, every second",
}
SETTLE_S = 0.5


@contextmanager
def under_way(name: str, target: Target, cpu: int) -> Iterator[None]:
    """Run the attack with a key of another account."""
    tool = Tool([sys.executable, str(TOOL), name, target.host, str(target.port), target.path, target.other_key], cpu)
    try:
        tool.line()
        time.sleep(SETTLE_S)
        yield
    finally:
        tool.stop()
