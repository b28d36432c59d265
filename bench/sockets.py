"""WebSockets: what a message to many costs, what many in a turn save, and what ten thousand clients take."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import machine, memory
from bench.loaders import Target
from bench.processes import StartFailed
from proxy.dev.chain import node_binary
from proxy.errors import StartError

TOOLS = Path(__file__).parent / "tools"
ROOT = Path(__file__).parent.parent
LIBRARIES = ROOT / "tests" / "clients"
PING_BYTES = 2
HEAD_BYTES = 600
FAN_MESSAGES = 50_000  # in one measurement; and so many heads at least
FAN_ROUNDS = 10
IN_A_TURN = 8
ANSWER_S = 180.0


class Tool:
    """A program that answers each line with a line of JSON."""

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

    def line(self) -> dict[str, object]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise StartFailed(f"{self._process.args[3:5]} ended early")  # type: ignore[index]
        found: dict[str, object] = json.loads(text)
        return found

    def ask(self, **question: object) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
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
    """A server with so many clients. What is yielded sends heads to all of them and says µs of CPU for each message."""
    server = Tool(_argv(candidate), layout.service[0])
    try:
        place = server.line()
        target = Target("127.0.0.1", int(str(place["port"])), str(place["path"]), "")
        with _audience(target, count, layout.load) as audience:

            def send(*, rounds: int = max(FAN_ROUNDS, FAN_MESSAGES // count), together: int = 1) -> float:
                before = int(str(audience.ask()["bytes"]))
                used = machine.cpu_seconds([server.pid])
                server.ask(rounds=rounds, together=together, size=HEAD_BYTES)
                used = machine.cpu_seconds([server.pid]) - used
                _check_arrival(audience, before, rounds * count)
                return used / (rounds * count) * 1e6

            send(rounds=20)  # until a compiler at run time has seen enough of it
            yield send
    finally:
        server.stop()


def _check_arrival(audience: Tool, before: int, messages: int) -> None:
    """Every byte that was sent has arrived: a frame of 600 bytes has a head of four. And pings, from those who send them."""
    wanted = messages * (HEAD_BYTES + 4)
    end = time.monotonic() + ANSWER_S
    while (got := int(str(audience.ask()["bytes"])) - before) < wanted:
        if time.monotonic() > end:
            raise StartFailed(f"only {got:,} of {wanted:,} bytes arrived")
        time.sleep(0.1)
    if (got - wanted) % PING_BYTES or got - wanted > PING_BYTES * messages:
        raise StartFailed(f"{got:,} bytes arrived instead of {wanted:,}")


# Ten thousand of them


@dataclass(frozen=True, slots=True)
class Crowd:
    """What so many subscribed clients of a running service take."""

    kilobytes: float
    spreads_ms: list[float]  # from the first client that had a head to the last, for each head
    p99_alone_us: list[float]
    p99_beside_us: list[float]


def crowd(target: Target, count: int, layout: machine.Layout, p99: Callable[[], float], *, rounds: int) -> Crowd:
    """`p99` measures the calls of the same service, before the clients are there and beside them."""
    alone = [p99() for _ in range(rounds)]
    pids = machine.listeners(target.port)
    path = f"/v1/ws/dev/mainnet?apiKey={target.key}"
    place = Target(target.host, target.port, path, target.key)
    with _audience(place, 50, layout.load):  # what the first few cost belongs to the process
        before = memory.settled(pids)
        with _audience(place, count, layout.load) as audience:
            kilobytes = (memory.settled(pids) - before) / count / 1024
            audience.ask()
            beside = [p99() for _ in range(rounds)]
            spreads = _spreads(audience, count)
    return Crowd(kilobytes, spreads, alone, beside)


def _spreads(audience: Tool, count: int) -> list[float]:
    """Of the heads that everybody had while the calls were measured, and one more where there were none."""
    found: list[float] = []
    end = time.monotonic() + ANSWER_S
    while not found and time.monotonic() < end:
        told = audience.ask()
        if told["lost"]:
            raise StartFailed(f"{told['lost']} clients lost their connection")
        waves: list[tuple[float, float, int]] = told["waves"]  # type: ignore[assignment]
        found = [(last - first) * 1000 for first, last, had in waves if had == count]
        time.sleep(0.5)
    if not found:
        raise StartFailed(f"no head reached all {count:,} clients in one wave")
    return found
