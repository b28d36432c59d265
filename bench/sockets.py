"""WebSockets: the cost of a message to many clients, the savings of combined writes, and the cost of 10,000 clients."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, memory
from bench.loaders import Target
from bench.processes import StartFailed
from proxy.dev.npm_packages import node_binary
from proxy.errors import StartError

TOOLS = Path(__file__).parent / "tools"
ROOT = Path(__file__).parent.parent
LIBRARIES = ROOT / "tests" / "clients"
PING_BYTES = 2
HEAD_BYTES = 600
FAN_MESSAGES = 50_000  # per measurement, with at least FAN_ROUNDS heads
FAN_ROUNDS = 10
IN_A_TURN = 8
ANSWER_S = 180.0


class Tool:
    """A program that replies to each line on standard input with a line of JSON."""

    def __init__(self, argv: Sequence[str], cpu: int) -> None:
        self._process = subprocess.Popen(
            ["taskset", "-c", str(cpu), *argv],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise StartFailed(f"{self._process.args!r} exited early")
        found: dict[str, Any] = json.loads(text)
        return found

    def request(self, **arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return self.line()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _argv(candidate: str) -> list[str]:
    if candidate != "ws":
        return [sys.executable, str(TOOLS / "fan.py"), candidate]
    if not (LIBRARIES / "node_modules" / "ws").exists():
        raise StartFailed(f"npm's ws is not installed: run `npm ci` in {LIBRARIES.relative_to(ROOT)}")
    try:
        node = str(node_binary())
    except StartError as error:
        raise StartFailed(str(error)) from error
    return [node, str(TOOLS / "fan.mjs"), str(LIBRARIES)]


@contextmanager
def _audience(target: Target, count: int, cpu: int) -> Iterator[Tool]:
    tool = Tool(
        [sys.executable, str(TOOLS / "audience.py"), target.host, str(target.port), target.path, str(count)], cpu
    )
    try:
        tool.line()
        yield tool
    finally:
        tool.stop()


@contextmanager
def fan(candidate: str, count: int, layout: machine.Layout) -> Iterator[Callable[..., float]]:
    """Start a server with `count` clients; yield a function that sends heads to all and returns µs of CPU per message."""
    server = Tool(_argv(candidate), layout.service[0])
    try:
        place = server.line()
        target = Target("127.0.0.1", int(str(place["port"])), str(place["path"]), "")
        with _audience(target, count, layout.load) as audience:

            def send(*, rounds: int = max(FAN_ROUNDS, FAN_MESSAGES // count), together: int = 1) -> float:
                before = int(str(audience.request()["bytes"]))
                used = machine.cpu_seconds([server.pid])
                server.request(rounds=rounds, together=together, size=HEAD_BYTES)
                used = machine.cpu_seconds([server.pid]) - used
                _check_arrival(audience, before, rounds * count)
                return used / (rounds * count) * 1e6

            send(rounds=20)  # warm-up for JIT compilers
            yield send
    finally:
        server.stop()


def _check_arrival(audience: Tool, before: int, messages: int) -> None:
    """Check that every byte has arrived: a 600-byte frame has a 4-byte header. Servers may send pings as well."""
    wanted = messages * (HEAD_BYTES + 4)
    end = time.monotonic() + ANSWER_S
    while (got := int(str(audience.request()["bytes"])) - before) < wanted:
        if time.monotonic() > end:
            raise StartFailed(f"only {got:,} of {wanted:,} bytes arrived")
        time.sleep(0.1)
    if (got - wanted) % PING_BYTES or got - wanted > PING_BYTES * messages:
        raise StartFailed(f"{got:,} bytes arrived instead of {wanted:,}")


# Many subscribed clients


@dataclass(frozen=True, slots=True)
class Crowd:
    """The cost of many subscribed clients of a running service."""

    kilobytes: float
    spreads_ms: list[float]  # per head: delay between the first and the last client that got it
    p99_alone_us: list[float]
    p99_beside_us: list[float]


def crowd(target: Target, count: int, layout: machine.Layout, p99: Callable[[], float], *, rounds: int) -> Crowd:
    """`p99` measures calls to the same service, first without the clients and then with them. Those have the time that load
    and stub leave of their core: otherwise calls would wait for clients that read, and not for the service."""
    alone = [p99() for _ in range(rounds)]
    pids = machine.listeners(target.port)
    path = f"/v1/ws/dev/mainnet?apiKey={target.key}"
    place = Target(target.host, target.port, path, target.key)
    with _audience(place, 50, layout.load):  # warm-up: one-time allocations of the process
        before = memory.settled(pids)
        with _audience(place, count, layout.load) as audience:
            machine.be_idle(audience.pid)
            kilobytes = (memory.settled(pids) - before) / count / 1024
            audience.request()
            beside = [p99() for _ in range(rounds)]
            spreads = _spreads(audience, count)
    return Crowd(kilobytes, spreads, alone, beside)


def _spreads(audience: Tool, count: int) -> list[float]:
    """Delays of the heads that reached all clients during the calls; waits for one more head if there were none."""
    found: list[float] = []
    end = time.monotonic() + ANSWER_S
    while not found and time.monotonic() < end:
        report = audience.request()
        if report["lost"]:
            raise StartFailed(f"{report['lost']} clients lost their connection")
        waves: list[tuple[float, float, int]] = report["waves"]
        found = [(last - first) * 1000 for first, last, reached in waves if reached == count]
        time.sleep(0.5)
    if not found:
        raise StartFailed(f"no head reached all {count:,} clients in one wave")
    return found
