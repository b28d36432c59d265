"""`replay`: send captured calls again, to another gateway or a new version, at the pace at which clients sent them.

Calls are sent when they are due, whether or not earlier ones were answered. A call that is sent late, because this machine or
the limit of open calls delays it, is counted: the report says how well the pace was kept.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from proxy.commands import output
from proxy.commands.capture_file import CapturedCall, read_capture
from proxy.commands.progress import Progress, duration
from proxy.core.latency_histogram import bucket_of
from proxy.core.usage import BUCKETS, quantile_ms
from proxy.errors import InvalidRequest, StartError
from proxy.settings import environment

KEY_VARIABLE: Final = "API_KEY"
NETWORK: Final = "{network}"
MOST_SPEED: Final = 1000.0
# Calls that may be open at once. Further ones are late.
MOST_OPEN: Final = 2000
# How long a reply may take.
REPLY_S: Final = 30.0
# Timers wake a millisecond or two late, so the last of the wait is made in single turns of the event loop.
FINE_S: Final = 0.003
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
    replay = CallReplay(calls, url, args.key or environment().get(KEY_VARIABLE, ""), args.speed)
    asyncio.run(replay.run(Progress(shown=not args.json)))
    replay.report(as_json=args.json)
    return int(replay.failed > 0)


@dataclass
class CallReplay:
    calls: list[CapturedCall]
    url: str
    key: str
    speed: float
    # How calls ended: "answered", or the reason why not.
    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    # How much later than due each call was sent, in seconds.
    delays: list[float] = field(default_factory=list)
    _sent: int = 0

    @property
    def failed(self) -> int:
        return self.outcomes.total() - self.outcomes["answered"] - self.outcomes["answered with an error"]

    async def run(self, progress: Progress) -> None:
        headers = {"Content-Type": "application/json", **({"X-API-Key": self.key} if self.key else {})}
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=REPLY_S)
        room = asyncio.Semaphore(MOST_OPEN)
        session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        async with session, asyncio.TaskGroup() as tasks:
            drawing = tasks.create_task(self._draw(progress))
            try:
                async with asyncio.TaskGroup() as sending:
                    await self._send_all(session, sending, room)
            finally:
                drawing.cancel()

    async def _send_all(
        self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup, room: asyncio.Semaphore
    ) -> None:
        began = time.monotonic() - self.calls[0].at_ms / 1000 / self.speed + FINE_S
        for number, call in enumerate(self.calls, 1):
            due = began + call.at_ms / 1000 / self.speed
            await _wait_until(due)
            await room.acquire()
            self.delays.append(time.monotonic() - due)
            self._sent = number
            tasks.create_task(self._send(session, number, call)).add_done_callback(lambda _: room.release())

    async def _send(self, session: aiohttp.ClientSession, number: int, call: CapturedCall) -> None:
        body = b'{"jsonrpc":"2.0","id":%d,"method":%b,"params":%b}' % (
            number,
            msgspec.json.encode(call.method),
            bytes(call.params),
        )
        began = time.monotonic()
        try:
            async with session.post(self.url.replace(NETWORK, call.network), data=body) as reply:
                text = await reply.read()
                outcome = outcome_of(reply.status, text)
        except TimeoutError:
            outcome = f"no reply within {REPLY_S:.0f} s"
        except aiohttp.ClientError:
            outcome = "no connection"
        self.outcomes[outcome] += 1
        self.latencies[bucket_of(time.monotonic() - began)] += 1

    async def _draw(self, progress: Progress) -> None:
        total = len(self.calls)
        length_s = (self.calls[-1].at_ms - self.calls[0].at_ms) / 1000 / self.speed
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
        delays = sorted(self.delays)
        late = sum(each > LATE_S for each in delays)
        found = {
            "calls": len(self.calls),
            **{name.replace(" ", "_"): count for name, count in sorted(self.outcomes.items())},
            "p50_ms": quantile_ms(self.latencies, 0.5),
            "p99_ms": quantile_ms(self.latencies, 0.99),
            "sent_late": late,
            "p99_delay_ms": round(delays[int(len(delays) * 0.99)] * 1000, 3),
        }
        output.row(found, as_json=as_json)
        if late > len(delays) // 100:
            print(
                f"{late:,} calls were sent more than a millisecond late: use a lower --speed, or another machine",
                file=sys.stderr,
            )


async def _wait_until(due: float) -> None:
    wait_s = due - time.monotonic()
    if wait_s > FINE_S:
        await asyncio.sleep(wait_s - FINE_S)
    while time.monotonic() < due:  # noqa: ASYNC110 - no event and no timer is as exact.
        await asyncio.sleep(0)


def outcome_of(status: int, body: bytes) -> str:
    """A JSON-RPC error is an answer: the one that was captured may have been one too."""
    if status != 200:
        return f"status {status}"
    try:
        reply = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "not JSON"
    if not isinstance(reply, dict) or not reply.keys() & {"result", "error"}:
        return "not a reply"
    return "answered with an error" if reply.get("error") is not None else "answered"
