"""The load generators (`load.c`, wrk) and the stub upstream (`stub.c`). The C tools are built on demand."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bench import machine, processes

HERE = Path(__file__).parent
BUILD = HERE.parent / ".penstock" / "bench"
MARKER = "@" * 12  # replaced in every request by a unique number; 12 digits are enough for any run

SETTLE_S = 0.5  # loads that run beside another one have begun by then
NUMBERS_PER_RUN = 10_000_000  # each measurement gets its own range of numbers, so that no call repeats by accident

WRK_TIMEOUT_S = 60  # it may be stopped for seconds while others take their turns

Generator = Literal["load", "wrk"]

_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Target:
    """A candidate's address, path and API key."""

    host: str
    port: int
    path: str
    key: str
    other_key: str = ""  # of another account
    free_keys: tuple[str, ...] = ()  # of accounts with the plan Free, if the case has them
    scheme: Literal["http", "https"] = "http"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: a candidate, a request, a few seconds."""

    requests: int
    elapsed_s: float
    bytes: int
    faults: int  # anything but a complete, matching 200
    late: int  # open loop only: due, but without a reply at the end
    p50_us: float
    p99_us: float
    max_us: float
    cpu_us_per_request: float  # of the processes that listen on the candidate's port
    service_share: float  # CPU used by those processes, in cores
    service_busy: float  # utilisation of the service's core by any process
    load_busy: float  # near 1 while service_busy is not: the load generator was the limit

    @property
    def per_second(self) -> float:
        return self.requests / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.elapsed_s if self.elapsed_s else 0.0

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Load:
    """The request template with its markers, the text every reply must contain, and the duration."""

    template: bytes
    expect: str
    connections: int
    seconds: float
    rate: float = 0.0  # open loop at this rate; 0: closed loop
    count: int = 0  # stop after this many requests; 0: stop by time only
    warmup_s: float = 0.3
    refusals: bool = False  # replies other than 200 are expected: they are counted, but not as latencies


def build(name: str) -> Path:
    """Compile a tool if its source is newer than the binary."""
    source, binary = HERE / "tools" / f"{name}.c", BUILD / name
    BUILD.mkdir(parents=True, exist_ok=True)
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        fresh = binary.with_suffix(f".{os.getpid()}")  # renamed into place: two benches may build at once
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(fresh), str(source)], check=True)
        fresh.replace(binary)
    return binary


class Stub:
    """A running stub upstream."""

    def __init__(self, name: str, *, size: int, delay_us: int = 0, at_once: int = 0, late_every: int = 0) -> None:
        self.name, self.size, self.delay_us, self.at_once, self.late_every = name, size, delay_us, at_once, late_every
        self.port = 0
        self._child: processes.Child | None = None

    def __repr__(self) -> str:
        return f"Stub({self.name}, port={self.port})"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, cpu: int, *, port: int, workdir: Path) -> None:
        self.port = port or processes.free_port()
        flags = ["--port", str(self.port), "--size", str(self.size), "--delay-us", str(self.delay_us)]
        flags += ["--at-once", str(self.at_once), "--late-every", str(self.late_every)]
        self._child = processes.start(
            f"stub-{self.name}", [str(build("stub")), *flags], cpus=[cpu], log=workdir / f"stub-{self.name}.log"
        )
        processes.wait_until_listening(self._child, self.port)

    def calls(self) -> int:
        """How many requests it has received, answered or not, if it delays them."""
        body = b'{"jsonrpc":"2.0","id":1,"method":"stub_calls","params":[]}'
        with urllib.request.urlopen(self.url, data=body, timeout=10) as reply:
            return int(json.load(reply)["result"])

    def pin(self, cpu: int) -> None:
        if self._child:
            machine.pin(self._child.pid, [cpu])

    def stop(self) -> None:
        if self._child:
            self._child.stop()


class DeadStub(Stub):
    """An address that refuses connections: its port is taken, so that no other program gets it, and not listened on."""

    _taken: socket.socket | None = None

    def start(self, cpu: int, *, port: int, workdir: Path) -> None:
        self._taken = socket.socket()
        self._taken.bind(("127.0.0.1", 0))
        self.port = self._taken.getsockname()[1]

    def stop(self) -> None:
        if self._taken:
            self._taken.close()


class DeepStub(Stub):
    """An upstream of the cost matrix: see `tools/deep_stub.py`. `name`: its family."""

    def start(self, cpu: int, *, port: int, workdir: Path) -> None:
        """Noted only: it takes seconds to start, and few cases need it."""
        self.port, self._cpu, self._workdir = processes.free_port(), cpu, workdir

    def run(self) -> None:
        """Start it if it is not running."""
        if self._child is None:
            argv = [sys.executable, str(HERE / "tools" / "deep_stub.py"), self.name, str(self.port)]
            log = self._workdir / f"stub-{self.name}.log"
            self._child = processes.start(f"stub-{self.name}", argv, cpus=[self._cpu], log=log)
            processes.wait_until_listening(self._child, self.port, timeout_s=60.0)
            machine.be_idle(self._child.pid)


class ValkeyStub(Stub):
    """The server of shared limits, on the stub's core."""

    @property
    def url(self) -> str:
        if not self.port:
            raise processes.StartFailed("neither valkey-server nor redis-server is installed")
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self, cpu: int, *, port: int, workdir: Path) -> None:
        server = machine.find_tool("valkey-server") or machine.find_tool("redis-server")
        if server is None:
            return
        self.port = processes.free_port()
        flags = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(workdir)]
        self._child = processes.start(self.name, [server, *flags], cpus=[cpu], log=workdir / f"{self.name}.log")
        processes.wait_until_listening(self._child, self.port)


def measure(load: Load, target: Target, layout: machine.Layout, *, workdir: Path) -> Sample:
    """Load one candidate and record the CPU use of its processes and of both cores."""
    request = write_request(load, target, workdir)
    pids = machine.listeners(target.port)
    cores = (*layout.service, layout.load)
    before, cpu_before = [machine.core_times(cpu) for cpu in cores], machine.cpu_seconds(pids)
    began = time.monotonic()
    seen = _run_load(load, target, layout.load, request)
    cpu_used, wall_s = machine.cpu_seconds(pids) - cpu_before, time.monotonic() - began
    busy = _busy(before, [machine.core_times(cpu) for cpu in cores])
    # Without the warm-up's share.
    share = seen["elapsed_s"] / (seen["elapsed_s"] + load.warmup_s * (not load.count))
    return replace(sample_of(seen, cpu_used * share, busy), service_share=cpu_used / wall_s)


def sample_of(seen: dict[str, float], cpu_s: float, busy: Sequence[float]) -> Sample:
    """A generator's output, and the machine's load meanwhile."""
    return Sample(
        requests=int(seen["requests"]),
        elapsed_s=seen["elapsed_s"],
        bytes=int(seen["bytes"]),
        faults=int(seen["faults"]),
        late=int(seen["late"]),
        p50_us=seen["p50_us"],
        p99_us=seen["p99_us"],
        max_us=seen["max_us"],
        cpu_us_per_request=cpu_s * 1e6 / max(1.0, seen["requests"]),
        service_share=cpu_s / max(1e-9, seen["elapsed_s"]),
        service_busy=sum(busy[:-1]) / len(busy[:-1]),
        load_busy=busy[-1],
    )


def write_request(load: Load, target: Target, workdir: Path) -> Path:
    request = workdir / f"request-{target.port}"  # other candidates may be measured at the same time
    request.write_bytes(load.template)
    return request


def _busy(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> list[float]:
    return [(b[0] - a[0]) / max(1, b[1] - a[1]) for a, b in zip(before, after, strict=True)]


@contextmanager
def beside(loads: Sequence[Load], target: Target, cpu: int, *, workdir: Path) -> Iterator[None]:
    """Run other loads at the same time, in the scheduler's idle class: they never delay the load that is measured."""
    children = []
    try:
        for number, load in enumerate(loads):
            request = workdir / f"request-beside-{number}"
            request.write_bytes(load.template)
            argv = ["chrt", "--idle", "0", *load_argv(load, target, cpu, request)]
            children.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(SETTLE_S)
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def _run_load(load: Load, target: Target, cpu: int, request: Path) -> dict[str, float]:
    return load_counts(_run(load_argv(load, target, cpu, request), timeout_s=load.seconds + 30), load)


def load_counts(seen: dict[str, float], load: Load) -> dict[str, float]:
    late = seen["late"] if seen["late"] > load.connections else 0  # the last few are only still in flight
    return {**seen, "late": late, "faults": seen["non_200"] + seen["mismatched"] + seen["errors"]}


def load_argv(load: Load, target: Target, cpu: int, request: Path) -> list[str]:
    flags = {
        "host": target.host,
        "port": target.port,
        "connections": load.connections,
        "seconds": load.seconds,
        "warmup": 0 if load.count else load.warmup_s,
        "rate": load.rate,
        "count": load.count,
        "request": request,
        "marker": MARKER,
        "first": next(_runs) * NUMBERS_PER_RUN,
        "cpu": cpu,
    }
    argv = [str(build("load")), *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    if load.expect:
        argv += ["--expect", load.expect]
    if load.refusals:
        argv.append("--refusals")
    return argv


def wrk_command(
    load: Load, target: Target, cpu: int, request: Path, seconds: float
) -> tuple[list[str], dict[str, str]]:
    """The command and its environment."""
    argv = [
        *("taskset", "-c", str(cpu), str(machine.find_tool("wrk")), "-t1", f"-T{WRK_TIMEOUT_S}s"),
        *(f"-c{load.connections}", f"-d{max(1, round(seconds))}s"),
        *("-s", str(HERE / "tools" / "wrk.lua"), f"{target.scheme}://{target.host}:{target.port}{target.path}"),
    ]
    first = str(next(_runs) * NUMBERS_PER_RUN)
    return argv, {**os.environ, "BENCH_REQUEST": str(request), "BENCH_MARKER": MARKER, "BENCH_FIRST": first}


def _run(argv: list[str], *, timeout_s: float) -> dict[str, float]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    return read_output(done.returncode, done.stdout, done.stderr)


def read_output(returncode: int, output: str, errors: str) -> dict[str, float]:
    """Parse a generator's last line as JSON. A failed run becomes a sample full of faults."""
    lines = output.strip().splitlines()
    if returncode or not lines:
        print(f"      {(errors or output).strip()}")
        names = ("requests", "bytes", "p50_us", "p99_us", "max_us", "non_200", "mismatched", "late")
        return {**dict.fromkeys(names, 0.0), "elapsed_s": 1.0, "errors": 1.0, "faults": 1.0}
    seen: dict[str, float] = json.loads(lines[-1])
    return seen
