"""Limits over three hosts on one Valkey: `python -m bench.fleet_limits [case ...]`.

Three processes stand for hosts (`tools/fleet_host.py`). They make calls at random moments (Poisson) on limits of 10, 100 and
1,000 per second, with 90, 9 and 1 % of the traffic, and change places every second. Every decision is recorded with its time
on one clock, and compared with one ideal bucket that gets the same calls:

- *over*: calls admitted beyond one bucket of a second's worth: 0 or less than one call means that the limit held
- *under*: calls refused that the ideal bucket would have admitted
- *waited*: calls that had to wait for Valkey before they were decided, and the longest wait

The faults happen four seconds long, in the middle of twelve. During a fault, *admitted* is relative to the limit.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Keys with each limit: many with a low one, so that the figures do not hang on a few calls.
KEYS = {10: 20, 100: 4, 1000: 1}
LIMITS = [limit for limit, keys in KEYS.items() for _ in range(keys)]
SECONDS, FAULT_FROM, FAULT_TO = 12.0, 4.0, 8.0
Decision = tuple[float, float, bool, bool]
Fault = Callable[["Valkey", "Cable"], Awaitable[None]]


class Valkey:
    """A server of its own for one case."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        words = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self._directory),
        ]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - it starts at once
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    async def stop(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None


class Cable:
    """The network between the hosts and Valkey: slow, or cut without a word."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self.delay_s = 0.0
        self.is_cut = False
        self.port = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, far_writer, 0.0), self._pass(far_reader, writer, 1.0))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delayed: float) -> None:
        loop, due = asyncio.get_running_loop(), 0.0
        try:
            while data := await reader.read(1 << 16):
                # In their order, also when the delay ends.
                due = max(due + 1e-6, loop.time() + self.delay_s * delayed)
                loop.call_at(due, self._write, writer, data)
        except OSError:
            pass
        finally:
            writer.close()

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not self.is_cut and not writer.is_closing():
            writer.write(data)


async def _kill(valkey: Valkey, _: Cable) -> None:
    await valkey.stop()
    await asyncio.sleep(FAULT_TO - FAULT_FROM)
    await valkey.start()


async def _freeze(valkey: Valkey, _: Cable) -> None:
    valkey.signal(signal.SIGSTOP)
    await asyncio.sleep(FAULT_TO - FAULT_FROM)
    valkey.signal(signal.SIGCONT)


async def _partition(_: Valkey, cable: Cable) -> None:
    cable.is_cut = True
    await asyncio.sleep(FAULT_TO - FAULT_FROM)
    cable.is_cut = False


async def _slow(_: Valkey, cable: Cable) -> None:
    cable.delay_s = 0.05
    await asyncio.sleep(FAULT_TO - FAULT_FROM)
    cable.delay_s = 0.0


# Each case: the load relative to the limit, whether hosts change places, and the fault.
CASES: dict[str, tuple[float, bool, Fault | None]] = {
    "below": (0.9, True, None),
    "above": (2.0, True, None),
    "killed": (0.9, False, _kill),
    "killed-above": (2.0, False, _kill),
    "killed-rotating": (2.0, True, _kill),
    "frozen": (0.9, False, _freeze),
    "partitioned": (0.9, False, _partition),
    "slow": (0.9, False, _slow),
    "slow-above": (2.0, True, _slow),
}


async def run(name: str, port: int) -> dict[str, Any]:
    load, rotates, fault = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        valkey = Valkey(Path(directory), port)
        await valkey.start()
        cable = Cable(port)
        await cable.open()
        hosts = [await _host(cable.port, host, load, rotates) for host in range(3)]
        start = time.monotonic() + 0.3
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write(f"{start}\n".encode())
            host.stdin.close()
        if fault is not None:
            await asyncio.sleep(start + FAULT_FROM - time.monotonic())
            await fault(valkey, cable)
        found = [json.loads((await host.communicate())[0]) for host in hosts]
        await cable.close()
        await valkey.stop()
    return {"name": name, "fault": fault is not None, "start": start, "load": load, "hosts": found}


async def _host(port: int, host: int, load: float, rotates: bool) -> asyncio.subprocess.Process:
    given = {"port": port, "host": host, "limits": LIMITS, "load": load, "seconds": SECONDS, "rotates": rotates}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.tools.fleet_host", json.dumps(given)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 28,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


# Figures


def ideal(times: list[float], rate: float) -> int:
    """How many of these calls one bucket of a second's worth admits."""
    edge, admitted = 0.0, 0
    for at in sorted(times):
        after = max(edge, at - 1.0) + 1.0 / rate
        if after - at <= 1e-6:
            edge = after
            admitted += 1
    return admitted


def beyond(times: list[float], rate: float) -> float:
    """How many calls more than one bucket holds were admitted, at the worst moment."""
    edge = worst = 0.0
    for at in sorted(times):
        edge = max(edge, at - 1.0) + 1.0 / rate
        worst = max(worst, edge - at)
    return worst * rate


def figures(found: dict[str, Any], limit: int) -> dict[str, float]:
    """The figures of all keys with this limit together. *Over* is that of the worst key."""
    keys = [decisions_of(found, key) for key, each in enumerate(LIMITS) if each == limit]
    every = [each for key in keys for each in key]
    admitted = sum(each[2] for each in every)
    best = sum(ideal([each[0] for each in key], limit) for key in keys)
    during = [each for each in every if FAULT_FROM <= each[0] - found["start"] < FAULT_TO]
    return {
        "calls": len(every),
        "over": round(max(beyond([each[1] for each in key if each[2]], limit) for key in keys), 2),
        "under %": round(100 * (1 - admitted / best), 2),
        "waited %": round(100 * sum(each[3] for each in every) / len(every), 1),
        "longest ms": round(1000 * max(each[1] - each[0] for each in every), 1),
        "admitted during": round(sum(each[2] for each in during) / (FAULT_TO - FAULT_FROM) / limit / len(keys), 3),
    }


def decisions_of(found: dict[str, Any], key: int) -> list[Decision]:
    return [tuple(each) for host in found["hosts"] for each in host["decisions"][key]]


async def main(names: list[str], port: int = 27611) -> None:
    for name in names or CASES:
        found = await run(name, port)
        calls = sum(len(each) for host in found["hosts"] for each in host["decisions"])
        asked = sum(host["asked"] for host in found["hosts"])
        cpu = sum(host["cpu_s"] for host in found["hosts"])
        per_call = f"{asked / calls:.3f} asks and {1e6 * cpu / calls:.0f} us of CPU per call"
        print(f"{name}: load {found['load']} of the limit, {per_call}")
        for limit in KEYS:
            print(f"  {limit:5d}/s {figures(found, limit)}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
