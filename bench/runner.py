"""Runs the cases: rounds go round-robin over the candidates, so that what disturbs the machine disturbs all alike."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from bench import admission, machine, memory
from bench.cases import ONE_BY_ONE, Case
from bench.figures import Figure, Row
from bench.fleet import Fleet, probe
from bench.loaders import Generator, Load, Sample, Target, measure
from bench.processes import StartFailed

CACHED_REPLIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Skip:
    what: str
    why: str


@dataclass(slots=True)
class Runner:
    fleet: Fleet
    layout: machine.Layout
    pair: machine.Layout | None  # the layout for two workers, where there are cores for it
    rounds: int
    seconds: float
    workdir: Path
    skips: list[Skip] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    _admission: dict[str, float] | None = None
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def run(self, case: Case) -> None:
        """One case: its figures and what had to be left out are added to the runner's."""
        print(f"\n{case.name}: {case.title}", flush=True)
        match case.kind:
            case "rate" | "bytes":
                self._run_rates(case)
            case "latency":
                self._run_latency(case)
            case "workers":
                self._run_workers(case)
            case "idle" | "cached":
                self._run_memory(case)
            case "admission":
                self._run_admission(case)

    # --- rates --------------------------------------------------------------------------------------------------------

    def _run_rates(self, case: Case) -> None:
        targets = self._ready(case)
        for generator in self._generators(case):
            take = partial(self._sample, case, generator=generator)
            rows = self._interleave(targets, take, case, generator)
            for row in rows.values():
                row.values = [_rate(case, sample) for sample in row.samples]
            if any(aim.over == ONE_BY_ONE for aim in case.aims) and (single := self._single_calls()):
                rows[ONE_BY_ONE] = single
            name = f"{case.name}/{generator}" if len(case.generators) > 1 else case.name
            self.figures.append(Figure(case, name, f"{case.title} [{generator}]", case.unit, rows, case.aims))

    def _single_calls(self) -> Row | None:
        """nginx's row of the small call, where this run has measured it."""
        found = [figure.rows.get("nginx") for figure in self.figures if figure.name == "small/load"]
        return found[0] if found else None

    def _generators(self, case: Case) -> list[Generator]:
        if "wrk" in case.generators and machine.find_tool("wrk") is None:
            self._skip(f"{case.name}/wrk", "wrk is not installed")
            return [each for each in case.generators if each != "wrk"]
        return list(case.generators)

    def _sample(
        self,
        case: Case,
        target: Target,
        *,
        generator: Generator = "load",
        rate: float = 0.0,
        layout: machine.Layout | None = None,
    ) -> Sample:
        load = Load(case.template(target), case.expect, case.connections, self.seconds, rate)
        return measure(generator, load, target, layout or self.layout, workdir=self.workdir)

    def _interleave(
        self, targets: dict[str, Target], take: Callable[[Target], Sample], case: Case, label: str
    ) -> dict[str, Row]:
        """Each round measures every candidate once, each time beginning with another."""
        rows = {name: Row() for name in targets}
        for turn in range(self.rounds):
            for name in _rotated(list(targets), turn):
                sample = take(targets[name])
                rows[name].samples.append(sample)
                print(f"  {label} {turn + 1}/{self.rounds}  {name:<10} {_describe(case, sample)}", flush=True)
        return rows

    # --- latency ------------------------------------------------------------------------------------------------------

    def _run_latency(self, case: Case) -> None:
        targets = self._ready(case)
        if "nginx" not in targets:
            self._skip(case.name, "the load is half of nginx's rate, and nginx is missing")
            return
        rate = self._nginx_rate(case, targets["nginx"]) / 2
        print(f"  at a fixed {rate:,.0f} calls/s", flush=True)
        rows = self._interleave(targets, partial(self._sample, case, rate=rate), case, "open loop")
        direct = rows.pop("direct").samples
        for name, read in (("p50", _p50), ("p99", _p99)):
            base = [read(sample) for sample in direct]
            added = {
                candidate: Row([read(s) - b for s, b in zip(row.samples, base, strict=True)], row.samples)
                for candidate, row in rows.items()
            }
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            title = f"{case.title}: {name} (direct: {median(base):.0f} µs)"
            method = f"open loop at {rate:,.0f} calls/s over {case.connections} connections"
            self.figures.append(Figure(case, f"{case.name}/{name}", title, case.unit, added, aims, method))

    def _nginx_rate(self, case: Case, target: Target) -> float:
        """From this run's small call if it was measured, else from a measurement of its own."""
        for figure in self.figures:
            if figure.name in ("small/load", "small") and "nginx" in figure.rows:
                return median(figure.rows["nginx"].values)
        load = Load(case.template(target), case.expect, 64, self.seconds)
        return measure("load", load, target, self.layout, workdir=self.workdir).per_second

    # --- workers ------------------------------------------------------------------------------------------------------

    def _run_workers(self, case: Case) -> None:
        layout = self.pair or machine.Layout(
            (self.layout.service[0], self.layout.load), self.layout.load, self.layout.load, ""
        )
        stub = self.fleet.stubs[case.stub]
        stub.pin(layout.stub)
        try:
            rows = {name: row for name in case.candidates if (row := self._scale(case, name, layout))}
        finally:
            stub.pin(self.layout.stub)
        method = (
            layout.text
            if self.pair
            else "ESTIMATE: there are no four cores, so twice the calls per CPU second of two "
            "workers over one, while load and stub share their cores"
        )
        self.figures.append(
            Figure(case, case.name, case.title, case.unit, rows, case.aims, method, is_estimate=self.pair is None)
        )

    def _scale(self, case: Case, name: str, layout: machine.Layout) -> Row | None:
        """One worker and two, in turn. The two gateways never run loaded at the same time."""
        targets = {}
        for workers in (1, 2):
            cpus = layout.service[:workers]
            target = self._try(case, name, workers=workers, cpus=cpus)
            if target is None:
                return None
            targets[str(workers)] = target

        taken = self._interleave(targets, partial(self._sample, case, layout=layout), case, f"{name}, workers:")
        pairs = list(zip(taken["1"].samples, taken["2"].samples, strict=True))
        values = [
            two.per_second / max(1.0, one.per_second)
            if self.pair
            else 2 * one.cpu_us_per_request / max(0.001, two.cpu_us_per_request)
            for one, two in pairs
        ]
        return Row(values, [two for _, two in pairs], shares_core=self.pair is None)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _run_memory(self, case: Case) -> None:
        rows: dict[str, Row] = {}
        targets = self._ready(case)
        count = memory.connections_possible(case.connections)
        for name, target in targets.items():
            try:
                value = self._memory_of(case, target, count)
            except OSError as error:
                self._skip(f"{case.name}: {name}", str(error))
                continue
            rows[name] = Row([value])
            print(f"  {name:<10} {value:,.2f} {case.unit}", flush=True)
        method = "resident memory of the processes that listen on the candidate's port"
        if case.kind == "idle":
            method += f"; {count:,} connections"
        self.figures.append(Figure(case, case.name, case.title, case.unit, rows, case.aims, method))

    def _memory_of(self, case: Case, target: Target, count: int) -> float:
        if case.kind == "idle":
            return memory.bytes_per_idle_connection(target, case, count) / 1024
        return memory.growth_per_cached_byte(target, case, self.layout, count=CACHED_REPLIES, workdir=self.workdir)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _run_admission(self, case: Case) -> None:
        """Measured once a run, without a service: the two cases are figures of the same measurement."""
        if self._admission is None:
            self.fleet.keep_only(set())
            self._admission = admission.figures(self.workdir, (*self.layout.service, self.layout.load))
        for aim in case.aims:
            value = self._admission[aim.figure]
            print(f"  {aim.figure:<10} {value:.2f} {case.unit}", flush=True)
            name = f"{case.name}/{aim.figure}" if len(case.aims) > 1 else case.name
            title = f"{case.title}{': ' + aim.figure if len(case.aims) > 1 else ''}"
            self.figures.append(Figure(case, name, title, case.unit, {"penstock": Row([value])}, (aim,)))

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _ready(self, case: Case) -> dict[str, Target]:
        """Every candidate of the case that runs and answers; the reasons of the others are kept."""
        names = list(case.candidates)
        if case.stub == "small" and case.kind in ("rate", "latency"):
            names += list(self.fleet.peers)  # a peer's upstream is fixed: the small stub
        self.fleet.keep_only({self.fleet.member(name, case) for name in names})
        found = {name: self._try(case, name, cpus=self.layout.service) for name in names}
        return {name: target for name, target in found.items() if target is not None}

    def _try(self, case: Case, name: str, *, cpus: tuple[int, ...], workers: int = 1) -> Target | None:
        try:
            target = self.fleet.target(self.fleet.member(name, case, workers=workers), cpus)
            said = [probe(target, case, next(self._numbers)) for _ in range(2)][-1]
            if name == "penstock" and case.cache and said != case.cache:
                raise StartFailed(f"X-Cache says {said or 'nothing'} where the case needs {case.cache}")
        except StartFailed as error:
            self._skip(f"{case.name}: {name}", str(error))
            return None
        return target

    def _skip(self, what: str, why: str) -> None:
        print(f"  SKIPPED {what}: {why}", flush=True)
        self.skips.append(Skip(what, why))


def _rotated(names: Sequence[str], by: int) -> list[str]:
    at = by % len(names) if names else 0
    return [*names[at:], *names[:at]]


def _rate(case: Case, sample: Sample) -> float:
    return sample.bytes_per_second / 1e6 if case.kind == "bytes" else sample.per_second * case.calls_per_request


def _p50(sample: Sample) -> float:
    return sample.p50_us


def _p99(sample: Sample) -> float:
    return sample.p99_us


def _describe(case: Case, sample: Sample) -> str:
    if case.kind == "latency":
        figure = f"p50 {sample.p50_us:,.0f} µs, p99 {sample.p99_us:,.0f} µs"
    else:
        unit = "calls/s" if case.kind == "workers" else case.unit
        figure = f"{_rate(case, sample):>10,.0f} {unit}, {sample.cpu_us_per_request:.1f} µs of CPU each"
    trouble = (f", {sample.faults} FAULTS" if sample.faults else "") + (f", {sample.late} late" if sample.late else "")
    return figure + trouble
