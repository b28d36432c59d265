"""Runs seeds, each in a process forked from one that has imported the program, and reports.

A seed that fails is shrunk: parts of its scenario are left out one after the other, as long as the same rule is still broken.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from tests.simulation import seams
from tests.simulation.history import Event
from tests.simulation.mutants import MUTANTS, SEEDS, kept_seeds, plant
from tests.simulation.outcome import Outcome
from tests.simulation.process import COMPILED, HASH_SEED
from tests.simulation.timeline import svg_of, text_of

# A seed takes a second or two of CPU time. One that takes this long hangs, which is a failure. On a busy machine, seconds of a
# real clock say nothing.
LONGEST_CPU_S = 100
# Faults and inputs that a good set of seeds has all seen. The runner names those that are missing.
EXPECTED = (
    "client cut", "copied to trial", "connection frozen", "connection refused", "connection reset", "connection unanswered",
    "fork late", "lie", "machine busy", "malformed bytes",
    "malformed cut", "malformed flip", "malformed json", "malformed key", "malformed length", "reorganisation",
    "reply cut_off", "reply foreign", "reply garbage", "reply hang", "reply hang_up", "reply http_429", "reply http_500",
    "reply overloaded", "reply reply_lost", "reply twice", "segment stalled", "state pruned", "upstream behind",
    "stream closed", "stream mute", "stream repeats", "upstream cut", "upstream down", "upstream fork", "upstream late",
    "upstream paused", "upstream silent", "upstream stuck", "valkey clock set", "valkey cut", "valkey deaf", "valkey hangs",
    "valkey restarted",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a seed."""

    seed: int
    without: frozenset[str] = frozenset()
    # Another load than the seed's: see `loaded`.
    load: str = ""
    # Keep the events, and those on the wire too.
    keeps_events: bool = False
    keeps_wire: bool = False


@dataclass(slots=True)
class Run:
    """The result of a job. `failure` is the reason if the process did not finish."""

    job: Job
    outcome: Outcome | None = None
    failure: str = ""
    cpu_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Run of seed {self.job.seed}: {self.failure or self.outcome!r}>"

    @property
    def rules(self) -> set[str]:
        """The rules that were broken."""
        if self.outcome is None:
            return {"ends"}
        return {each.rule for each in self.outcome.violations}


class Simulator:
    """This process, with the program imported and the seams in place."""

    def __init__(self, mutant: str = "", *, is_compiled: bool = False) -> None:
        """`mutant`: a planted bug, which needs the sources."""
        self._seams = seams.install()
        if mutant:
            plant(mutant)
        from tests.simulation.world import Gateway  # Imports the program, once for all seeds.

        found = str(import_module("proxy.wire.http_upstream").__file__)
        if is_compiled == found.endswith(".py"):
            raise SystemExit(f"{found} was imported: compile the program with `python -m proxy compile`")
        self._seams.imported()
        Gateway.preload()
        # Collections of garbage need not look at the program itself, which stays.
        gc.collect()
        gc.freeze()

    def __repr__(self) -> str:
        return f"<Simulator {self._seams!r}>"

    def run_here(self, job: Job) -> Run:
        """Run the seed in this process."""
        from tests.simulation.scenario import loaded, scenario_of
        from tests.simulation.world import World

        began = seams.cpu_s()
        world = World(loaded(scenario_of(job.seed), job.load).leaving_out(job.without), self._seams)
        if job.keeps_events:
            world.history.keep_events()
        if job.keeps_wire:
            world.history.keep_wire()
        outcome = world.run()
        history = world.history
        return Run(job, outcome, cpu_s=seams.cpu_s() - began, events=history.events, lines=history.lines)

    def run_all(self, jobs: Iterable[Job], processes: int) -> Iterator[Run]:
        """Run the jobs, each in a process of its own, a few at a time. The results come in no particular order."""
        waiting, under_way = iter(jobs), dict[int, tuple[Job, int, bytearray]]()
        while True:
            while len(under_way) < processes and (job := next(waiting, None)) is not None:
                under_way.update([self._start(job)])
            if not under_way:
                return
            ready = _readable([*under_way], 1.0)
            for fd in [*under_way]:
                job, pid, received = under_way[fd]
                if fd in ready and (data := os.read(fd, 1 << 20)):
                    received += data
                elif fd in ready:
                    del under_way[fd]
                    yield _finished(job, pid, fd, bytes(received))

    def _start(self, job: Job) -> tuple[int, tuple[Job, int, bytearray]]:
        reading, writing = os.pipe()
        sys.stdout.flush()
        if pid := os.fork():
            os.close(writing)
            return reading, (job, pid, bytearray())
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_CPU_S, LONGEST_CPU_S))
        try:
            result = self.run_here(job)
        except BaseException as exc:
            result = Run(job, failure=f"{type(exc).__name__}: {exc}")
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)


def _readable(fds: list[int], within_s: float) -> set[int]:
    poll = select.epoll()
    try:
        for fd in fds:
            poll.register(fd, select.EPOLLIN)
        return {fd for fd, _ in poll.poll(within_s)}
    finally:
        poll.close()


def _finished(job: Job, pid: int, fd: int, received: bytes) -> Run:
    os.close(fd)
    status = os.waitpid(pid, 0)[1]
    if received:
        found: Run = pickle.loads(received)
        return found
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return Run(job, failure=f"did not finish within {LONGEST_CPU_S} s" if is_late else f"ended with status {status}")


# Shrinking


def shrink(simulator: Simulator, failed: Run, processes: int) -> Run:
    """The same failure with as few parts as possible."""
    from tests.simulation.scenario import scenario_of

    rules, best = failed.rules, failed

    def still_fails(names: frozenset[str]) -> bool:
        nonlocal best
        (run,) = simulator.run_all([Job(failed.job.seed, names, failed.job.load, keeps_events=True)], 1)
        if run.rules & rules:
            best = run
            return True
        return False

    scenario = scenario_of(failed.job.seed)
    without = _first_seconds(failed)
    if not (without and still_fails(without)):
        without = failed.job.without
    for half in _halves(scenario.parts):
        if still_fails(without | half):
            without |= half
    for part in scenario.parts:
        if part not in without and still_fails(without | {part}):
            without |= {part}
    still_fails(without)
    return best


def _first_seconds(run: Run) -> frozenset[str]:
    """Keep only what happened until the first violation."""
    if run.outcome is None or not run.outcome.violations:
        return frozenset()
    return frozenset({f"first {run.outcome.violations[0].at_s:.3f} s"})


def _halves(parts: list[str]) -> Iterator[frozenset[str]]:
    middle = len(parts) // 2
    yield from (frozenset(parts[middle:]), frozenset(parts[:middle]))


# The command


@dataclass(slots=True)
class Totals:
    """Figures over all seeds so far."""

    runs: int = 0
    calls: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    coverage: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, run: Run) -> None:
        self.runs += 1
        self.cpu_s += run.cpu_s
        if run.outcome is not None:
            self.calls += run.outcome.calls
            self.virtual_s += run.outcome.virtual_s
            self.coverage.update(run.outcome.coverage)
            self.outcomes.update(run.outcome.outcomes)

    def __str__(self) -> str:
        cpu_s = max(self.cpu_s, 1e-9)
        return (
            f"{self.runs} seeds, {self.calls} calls, {self.virtual_s:.0f} virtual seconds in {self.cpu_s:.1f} CPU seconds: "
            f"{self.calls / cpu_s:.0f} calls and {self.virtual_s / cpu_s:.0f} virtual seconds per CPU second"
        )


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.mutants is not None:
        return _find_mutants(args)
    simulator = Simulator(args.mutant, is_compiled=args.compiled)
    if args.timeline:
        return _show_one(simulator, args)
    if args.digests:
        return _print_digests(simulator, args)
    began, totals, failed = seams.real_s(), Totals(), list[Run]()
    end = began + args.hours * 3600 if args.hours else None
    for run in simulator.run_all(_jobs(args, end), args.processes):
        totals.add(run)
        if run.rules:
            failed.append(run)
            _clear_progress()
            _report(simulator, run, args, shrinks=len(failed) <= args.shrinks)
        _progress(totals, len(failed), began, args, end)
        if args.fail_fast and failed:
            break
    _clear_progress()
    print(totals)
    print(f"outcomes: {', '.join(f'{name} {count}' for name, count in sorted(totals.outcomes.items()))}")
    missing = [name for name in EXPECTED if not totals.coverage[name]]
    print(f"faults and inputs: {len(EXPECTED) - len(missing)} of {len(EXPECTED)} kinds")
    if missing:
        print(f"  not met: {', '.join(missing)}")
    if failed:
        print(f"{len(failed)} seeds failed: {' '.join(str(run.job.seed) for run in failed)}")
    return 1 if failed else 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="the first seed, or all of several")
    parser.add_argument("--seeds", type=int, default=40, help="how many seeds to run")
    parser.add_argument("--hours", type=float, default=0.0, help="run for this long instead")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shrinks", type=int, default=3, help="how many failures to shrink")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    parser.add_argument("--without", action="append", default=[], help="leave out this part of the scenario")
    parser.add_argument("--load", default="", choices=("", "small", "idle"), help="use another load, to measure speed")
    parser.add_argument("--mutant", default="", choices=("", *MUTANTS), help="plant this bug")
    parser.add_argument(
        "--mutants", nargs="*", help="find these planted bugs, or all of them, within --seeds seeds each"
    )
    parser.add_argument(COMPILED, action="store_true", help="run the compiled program, not its sources")
    parser.add_argument("--timeline", action="store_true", help="run one seed and show what happened")
    parser.add_argument(
        "--digests",
        default="",
        choices=("", "here", "forked"),
        help="print the digest of each seed: all in this process, or each in its own",
    )
    parser.add_argument(HASH_SEED, type=int, default=0, help="PYTHONHASHSEED, on which no history should depend")
    parser.add_argument("--wire", type=Path, help="with --timeline: write all events on the wire to this file")
    parser.add_argument("--svg", type=Path, help="with --timeline: draw a sequence diagram into this file")
    return parser.parse_args(argv)


def _jobs(args: argparse.Namespace, end: float | None) -> Iterator[Job]:
    first, *others = args.seed
    seeds: Iterable[int] = args.seed if others else range(first, first + args.seeds)
    if end is not None:
        seeds = itertools.takewhile(lambda _: seams.real_s() < end, itertools.count(first))
    return (Job(seed, frozenset(args.without), args.load) for seed in seeds)


def _show_one(simulator: Simulator, args: argparse.Namespace) -> int:
    job = Job(args.seed[0], frozenset(args.without), args.load, keeps_events=True, keeps_wire=args.wire is not None)
    run = simulator.run_here(job)
    assert run.outcome is not None
    print(text_of(run.events))
    print(run.outcome)
    for each in run.outcome.violations:
        print(each)
    if args.wire is not None:
        args.wire.write_text("\n".join(run.lines))
    if args.svg is not None:
        args.svg.write_text(svg_of(run.events))
    return 1 if run.rules else 0


def _find_mutants(args: argparse.Namespace) -> int:
    """Run seeds with each bug, in a process of its own, until one fails: first the seed that has found it before."""
    missed, kept = [], kept_seeds()
    for name in args.mutants or MUTANTS:
        began = seams.real_s()
        found = _found_by(name, kept[name], 1, 1) if name in kept else ""
        found = found or _found_by(name, args.seed[0], args.seeds, args.processes)
        if found:
            kept[name] = int(found.split()[1])
            SEEDS.write_text(json.dumps({name: kept[name] for name in MUTANTS if name in kept}, indent=2) + "\n")
        else:
            missed.append(name)
        print(f"{name:<26} {found or 'not found'} ({seams.real_s() - began:.0f} s)", flush=True)
    count = len(args.mutants or MUTANTS)
    print(f"{count - len(missed)} of {count} planted bugs found within {args.seeds} seeds; missed: {missed}")
    return 1 if missed else 0


def _found_by(name: str, seed: int, seeds: int, processes: int) -> str:
    """The line about the first of these seeds that finds the bug; empty if none does."""
    words = ["--mutant", name, "--seed", seed, "--seeds", seeds, "--processes", processes]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *map(str, words), "--fail-fast", "--shrinks", "0"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return next((line.strip() for line in done.stdout.splitlines() if line.startswith("seed ")), "")


def _print_digests(simulator: Simulator, args: argparse.Namespace) -> int:
    jobs = _jobs(args, None)
    for run in map(simulator.run_here, jobs) if args.digests == "here" else simulator.run_all(jobs, 1):
        assert run.outcome is not None, run.failure
        print(run.job.seed, run.outcome.digest, flush=True)
    return 0


def _report(simulator: Simulator, run: Run, args: argparse.Namespace, *, shrinks: bool) -> None:
    print(f"seed {run.job.seed} failed: {', '.join(sorted(run.rules))} {run.failure}")
    _print_first(run)
    if not shrinks:
        return
    small = shrink(simulator, run, args.processes)
    words = " ".join(f"--without '{name}'" for name in sorted(small.job.without))
    print(f"  shrunk by leaving out {len(small.job.without)} parts; what is left:")
    _print_first(small)
    print(text_of(small.events, last=40, until=small.outcome))
    print(f"  again: python -m tests.simulation --timeline --seed {run.job.seed} {words}")


def _print_first(run: Run) -> None:
    if run.outcome is not None:
        for each in run.outcome.violations[:3]:
            print(f"  {each}")


def _progress(totals: Totals, failed: int, began: float, args: argparse.Namespace, end: float | None) -> None:
    if not sys.stderr.isatty():
        return
    spent_s = max(seams.real_s() - began, 1e-9)
    share = spent_s / (end - began) if end is not None else totals.runs / args.seeds
    bar = "█" * round(30 * min(1.0, share))
    text = f"{bar:<30} {totals.runs} seeds, {totals.runs / spent_s:.1f}/s, {failed} failed"
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
