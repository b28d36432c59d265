"""Candidates that take turns of a fraction of a second, so that a slow phase of the machine is the same for all of them.

Each has its own load generator with its own connections, which waits between its turns: ours by itself, once every request has
its reply; wrk because it is stopped, and then the candidate is given a moment for the last replies.
"""

import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bench import machine
from bench.loaders import (
    Generator,
    Load,
    Sample,
    Target,
    load_argv,
    load_counts,
    read_output,
    sample_of,
    write_request,
    wrk_command,
)

SLICE_S = 0.1
# wrk's replies to the last requests of a turn are counted in the next one: in longer turns they are fewer.
WRK_SLICE_S = 0.25
WRK_SETTLE_S = 0.02
WRK_MOST_S = 600.0
# CPU time of the candidate after which wrk has begun.
WRK_BEGUN_S = 0.003


class TurnLoad(ABC):
    """The load of one candidate, and what the machine does in its turns."""

    slice_s: float

    def __init__(self, process: "subprocess.Popen[str]", target: Target, layout: machine.Layout) -> None:
        self._process = process
        self._cores = (*layout.service, layout.load)
        self._pids = machine.listeners(target.port)
        self._used_s = 0.0
        self._busy = [0] * len(self._cores)
        self._total = [0] * len(self._cores)

    def __enter__(self) -> "TurnLoad":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    @abstractmethod
    def warm_up(self) -> None: ...

    @abstractmethod
    def _run(self) -> None:
        """Load the candidate for a slice."""

    @abstractmethod
    def _counts(self) -> dict[str, float]:
        """End the load and return what it has counted."""

    def take(self) -> None:
        with self._watched():
            self._run()

    def end(self) -> Sample:
        seen = self._counts()
        busy = [busy / max(1, total) for busy, total in zip(self._busy, self._total, strict=True)]
        return sample_of(seen, self._used_s, busy)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        cores, used_s = self._core_times(), machine.cpu_seconds(self._pids)
        yield
        self._used_s += machine.cpu_seconds(self._pids) - used_s
        for at, (before, after) in enumerate(zip(cores, self._core_times(), strict=True)):
            self._busy[at] += after[0] - before[0]
            self._total[at] += after[1] - before[1]

    def _core_times(self) -> list[tuple[int, int]]:
        return [machine.core_times(cpu) for cpu in self._cores]


class OwnTurnLoad(TurnLoad):
    slice_s = SLICE_S

    def __init__(self, load: Load, target: Target, layout: machine.Layout, workdir: Path) -> None:
        self._load = load
        argv = load_argv(load, target, layout.load, write_request(load, target, workdir))
        super().__init__(_start([*argv, "--slice", str(SLICE_S)]), target, layout)

    def warm_up(self) -> None:
        self._run()

    def _run(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._process.stdout.readline()

    def _counts(self) -> dict[str, float]:
        output, errors = self._process.communicate()
        return load_counts(read_output(self._process.returncode, output, errors), self._load)


class WrkTurnLoad(TurnLoad):
    """wrk counts from its first request on, and its longest latencies are pauses."""

    slice_s = WRK_SLICE_S

    def __init__(self, load: Load, target: Target, layout: machine.Layout, workdir: Path) -> None:
        argv, env = wrk_command(load, target, layout.load, write_request(load, target, workdir), WRK_MOST_S)
        super().__init__(_start(argv, env), target, layout)
        self._process.send_signal(signal.SIGSTOP)
        self._elapsed_s = 0.0

    def warm_up(self) -> None:
        with self._watched():
            used_s = machine.cpu_seconds(self._pids)
            self._process.send_signal(signal.SIGCONT)
            while self._process.poll() is None and machine.cpu_seconds(self._pids) - used_s < WRK_BEGUN_S:
                time.sleep(0.001)
            self._run()

    def _run(self) -> None:
        began = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        time.sleep(WRK_SLICE_S)
        self._process.send_signal(signal.SIGSTOP)
        self._elapsed_s += time.monotonic() - began
        time.sleep(WRK_SETTLE_S)

    def _counts(self) -> dict[str, float]:
        began = time.monotonic()
        with self._watched():
            self._process.send_signal(signal.SIGCONT)
            output, errors = self._interrupt()
        seen = read_output(self._process.returncode, output, errors)
        elapsed_s = self._elapsed_s + time.monotonic() - began
        return {**seen, "elapsed_s": elapsed_s, "late": 0.0, "p99_us": 0.0, "max_us": 0.0}

    def _interrupt(self) -> tuple[str, str]:
        """wrk sleeps on if another thread than its first one gets the signal."""
        while True:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                return self._process.communicate(timeout=WRK_SETTLE_S)


LOADS: dict[Generator, type[OwnTurnLoad] | type[WrkTurnLoad]] = {"load": OwnTurnLoad, "wrk": WrkTurnLoad}


def measure_in_turns(
    generator: Generator, loads: Sequence[tuple[Load, Target]], layout: machine.Layout, *, seconds: float, workdir: Path
) -> list[Sample]:
    """A sample of each candidate. Every cycle starts with another one."""
    kind = LOADS[generator]
    with ExitStack() as stack:
        turns = [stack.enter_context(kind(load, target, layout, workdir)) for load, target in loads]
        for each in turns:
            each.warm_up()
        for cycle in range(max(1, round(seconds / kind.slice_s))):
            at = cycle % len(turns)
            for each in (*turns[at:], *turns[:at]):
                each.take()
        return [each.end() for each in turns]


def _start(argv: Sequence[str], env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
