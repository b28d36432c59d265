"""`replay`: send captured calls again, to another gateway or a new version, at the pace at which clients sent them.

Calls are sent when they are due, whether or not earlier ones were answered. A call that is sent late, because this machine or
the limit of open calls delays it, is counted: the report says how well the pace was kept.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from proxy.commands import output
from proxy.commands.capture_file import CapturedCall, read_capture
from proxy.commands.progress import Progress, duration
from proxy.commands.replay_connections import SPARE, DueCall, ReplayPool, ReplayTarget
from proxy.core.usage import quantile_ms
from proxy.errors import InvalidRequest, StartError
from proxy.settings import environment

KEY_VARIABLE: Final = "API_KEY"
NETWORK: Final = "{network}"
MOST_SPEED: Final = 1000.0
# Connections are opened before, for as many calls as arrived within this time at most.
BUSY_S: Final = 0.05
# The first call is sent this long after the beginning.
LEAD_S: Final = 0.01
# The last parts of a wait: see `_wait_until`.
FINE_S, NAP_S, FINEST_S = 0.002, 0.0002, 0.0001
# Calls that are sent without reading replies.
LONGEST_RUN: Final = 16
REPLY_CHECK_S: Final = 0.01
LATE_S: Final = 0.001
DRAW_S: Final = 0.2
BAR: Final = 30


def register(commands: Any) -> None:
    about = "send the calls of a file again, at the pace at which they arrived"
    parser = commands.add_parser(
        "replay",
        help=about,
        description=f"{about.capitalize()}. Exits with 1 if a call failed. `capture` writes such files.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that `capture` wrote")
    parser.add_argument(
        "--to",
        required=True,
        metavar="URL",
        help="the gateway, such as http://127.0.0.1:8545; {network} stands for the network if its paths are others; with "
        "--network, also a node",
    )
    parser.add_argument("--speed", type=float, default=1.0, metavar="N", help="times as fast (default: 1)")
    parser.add_argument("--network", metavar="NETWORK", help="only calls of this one; the URL is then used as it is")
    parser.add_argument("--key", metavar="KEY", help=f"the API key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    if not 0.0 < args.speed <= MOST_SPEED:
        raise InvalidRequest(f"--speed must be above 0, and at most {MOST_SPEED:.0f}")
    if not args.to.startswith(("http://", "https://")):
        raise StartError(["--to: must be an http or https URL"])
    calls = read_capture(args.file, args.network)
    url = args.to if args.network or NETWORK in args.to else f"{args.to.rstrip('/')}/v1/rpc/{NETWORK}"
    target = ReplayTarget(url, args.key or environment().get(KEY_VARIABLE, ""), NETWORK)
    replay = CallReplay(calls, target, args.speed)
    asyncio.run(replay.run(Progress(shown=not args.json)))
    replay.report(as_json=args.json)
    return int(replay.failed > 0)


class CallReplay:
    def __init__(self, calls: list[CapturedCall], target: ReplayTarget, speed: float) -> None:
        self._calls = calls
        self._target = target
        self._speed = speed
        self._pool = ReplayPool(target)
        self._sent = 0

    def __repr__(self) -> str:
        return f"<CallReplay {self._sent} of {len(self._calls)} sent, {self._pool!r}>"

    @property
    def failed(self) -> int:
        outcomes = self._pool.outcomes
        return outcomes.total() - outcomes["answered"] - outcomes["answered with an error"]

    async def run(self, progress: Progress) -> None:
        await self._pool.open(most_within(self._calls, BUSY_S * 1000 * self._speed) + SPARE)
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(self._draw(progress)), tasks.create_task(self._pool.sweep())]
            try:
                with no_garbage_collection():
                    await self._send_all()
                while self._pool.outcomes.total() < len(self._calls):  # noqa: ASYNC110 - replies are not worth an event each.
                    await asyncio.sleep(REPLY_CHECK_S)
            finally:
                for each in loops:
                    each.cancel()
                self._pool.close()

    async def _send_all(self) -> None:
        began = time.monotonic() - self._calls[0].at_ms / 1000 / self._speed + LEAD_S
        for number, call in enumerate(self._calls, 1):
            method = msgspec.json.encode(call.method)
            body = b'{"jsonrpc":"2.0","id":%d,"method":%b,"params":%b}' % (number, method, bytes(call.params))
            due = began + call.at_ms / 1000 / self._speed
            prepared = DueCall(self._target.request(call.network, body), due)
            await _wait_until(due)
            self._pool.send(prepared)
            self._sent = number
            if not number % LONGEST_RUN:
                await asyncio.sleep(0)  # Calls that are all due: read replies meanwhile.

    async def _draw(self, progress: Progress) -> None:
        total = len(self._calls)
        length_s = (self._calls[-1].at_ms - self._calls[0].at_ms) / 1000 / self._speed
        try:
            while True:
                share = self._sent / total
                bar = "█" * round(share * BAR) + "·" * (BAR - round(share * BAR))
                left = duration(max(0.0, length_s - progress.took_s))
                text = f"{self._sent:,} of {total:,} calls  {self.failed:,} failed  {left} left"
                progress.show(f"{bar} {share:.0%}  {text}", text)
                await asyncio.sleep(DRAW_S)
        finally:
            progress.close()

    def report(self, *, as_json: bool) -> None:
        pool, delays = self._pool, sorted(self._pool.delays)
        late = sum(each > LATE_S for each in delays)
        summary = {
            "calls": len(self._calls),
            **{name.replace(" ", "_"): count for name, count in sorted(pool.outcomes.items())},
            "p50_ms": quantile_ms(pool.latencies, 0.5),
            "p99_ms": quantile_ms(pool.latencies, 0.99),
            "sent_late": late,
            "p99_delay_ms": round(delays[int(len(delays) * 0.99)] * 1000, 3) if delays else None,
        }
        output.row(summary, as_json=as_json)
        if late > len(delays) // 100:
            print(
                f"{late:,} calls were sent more than a millisecond late: use a lower --speed, or another machine",
                file=sys.stderr,
            )


async def _wait_until(due: float) -> None:
    """The event loop's timers wake a millisecond or two late. So the last of the wait is made in turns of the loop, which read
    replies, and short naps between them: a process that does not sleep is not woken in time on a busy machine."""
    wait_s = due - time.monotonic()
    if wait_s > FINE_S:
        await asyncio.sleep(wait_s - FINE_S)
    while (wait_s := due - time.monotonic()) > FINEST_S:
        await asyncio.sleep(0)
        time.sleep(min(NAP_S, wait_s / 2))  # noqa: ASYNC251 - the loop has nothing else to do.
    while time.monotonic() < due:
        pass


def most_within(calls: list[CapturedCall], span_ms: float) -> int:
    """The most calls that arrived within a span of time."""
    most, first = 0, 0
    for last, call in enumerate(calls):
        while call.at_ms - calls[first].at_ms > span_ms:
            first += 1
        most = max(most, last - first + 1)
    return most


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A full collection takes longer than a call may be late."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
