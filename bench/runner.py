"""Run the cases. Rounds alternate between the candidates, so that a disturbance of the machine affects all of them."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from bench import (
    admission,
    attacks,
    balances,
    bodies,
    costs,
    delivery,
    faults,
    filters,
    holdings,
    machine,
    matching,
    memory,
    records,
    service,
    sockets,
    spans,
    sponsor,
    transfers,
    upstreams,
    usage,
    verified,
)
from bench.candidates import Candidates, probe
from bench.cases import (
    ALL_HEALTHY,
    BARE_CLIENT,
    FEW_ADDRESSES,
    FEW_TRANSFERS,
    LIMITED_AT_ONCE,
    LIMITED_MS,
    NO_ATTACK,
    NO_BACKFILL,
    NO_SOCKETS,
    NO_TRACES,
    NOT_VERIFIED,
    ONE_BY_ONE,
    ONE_IN_A_TURN,
    OTHER_CHECKOUT,
    OVERLOAD,
    SMALL_ONLY,
    Case,
    Kind,
)
from bench.figures import Figure, Row
from bench.loaders import Generator, Load, Sample, Target, beside, measure
from bench.processes import StartFailed
from bench.turns import measure_in_turns

CACHED_REPLIES = 1_000_000
# Latency rounds per ordinary round: the tail of a single round says more about the machine than about the candidate.
TAIL_ROUNDS = 3
# Rounds per ordinary round if all candidates run at the same time: their differences are small.
PAIRED_ROUNDS = 3
OVERLOAD_S = 5.0  # long enough for queues to fill
COSTS_S = 5.0  # how long subscriptions are held: some are polled every two seconds
ALONE_S = 10.0  # calls without an attack: enough for a p99
# Beside that many small calls per second: one in ten calls has a reply of 100 KB, one in a hundred one of 5 MB.
MIXED_RATE = 900.0
LARGEST = 5 * 1024 * 1024
LARGE_BATCHES_RATE = 5.0
HEDGE_RATE, HEDGE_S = 500.0, 6.0  # enough late replies for a p99
PEER_READY_S = 30.0
BESIDE_RATE = 1_000  # calls per second while heads are sent to all sockets


@dataclass(frozen=True, slots=True)
class Skip:
    what: str
    why: str


@dataclass(slots=True)
class Runner:
    candidates: Candidates
    layout: machine.Layout
    pair: machine.Layout | None  # the layout for two workers, if there are enough cores
    rounds: int
    seconds: float
    workdir: Path
    attacks: Sequence[str] = ()  # those to run; all if there are none
    peers: Sequence[str] = ()  # other gateways, which the bench starts
    full: bool = False  # as many reads and calls as the aims are about, where a usual run has fewer
    skips: list[Skip] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    _admission: admission.Costs | None = None
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def run(self, case: Case) -> None:
        """Run one case and add its figures and skips to the runner's."""
        print(f"\n{case.name}: {case.title}", flush=True)
        RUNS[case.kind](self, case)

    def _run_filters(self, case: Case) -> None:
        self._show_rows(case, {"penstock": Row([filters.milliseconds() for _ in range(self.rounds)])})

    def _run_matching(self, case: Case) -> None:
        found = matching.rounds(self.rounds)
        self._show_rows(case, {FEW_ADDRESSES: Row(found[matching.FEW]), "penstock": Row(found[matching.MANY])})

    def _run_upstreams(self, case: Case) -> None:
        self.candidates.keep_only(set())
        other = self.candidates.checkouts.get(OTHER_CHECKOUT)
        run = upstreams.Run(self.layout, self.workdir, self.rounds, full=self.full, other=other)
        for name, part in upstreams.parts():
            try:
                found = part(run)
            except StartFailed as error:
                self.skip(f"{case.name}: {name}", str(error))
                continue
            for figure, values in found.items():
                title, unit = upstreams.FIGURES[figure]
                self._show_part(case, figure, title, unit, {each: Row(rows) for each, rows in values.items()})

    # --- rates --------------------------------------------------------------------------------------------------------

    def _run_rates(self, case: Case) -> None:
        targets = self._ready(case)
        for generator in self._generators(case):
            rows = self._rows(targets, case, generator)
            for row in rows.values():
                row.values = [_rate(case, sample) for sample in row.samples]
            if any(aim.over == ONE_BY_ONE for aim in case.aims) and (single := self._single_calls()):
                rows[ONE_BY_ONE] = single
            name = f"{case.name}/{generator}" if len(case.generators) > 1 else case.name
            self.figures.append(Figure(case, name, f"{case.title} [{generator}]", case.unit, rows, case.aims))

    def _rows(self, targets: dict[str, Target], case: Case, generator: Generator) -> dict[str, Row]:
        loads = [(self._load(case, target), target) for target in targets.values()]
        rows = {name: Row() for name in targets}
        for turn in range(self.rounds):
            samples = measure_in_turns(generator, loads, self.layout, seconds=self.seconds, workdir=self.workdir)
            for name, sample in zip(targets, samples, strict=True):
                rows[name].samples.append(sample)
                self._print_sample(case, generator, turn, self.rounds, name, sample)
        return rows

    def _single_calls(self) -> Row | None:
        """nginx's row of the small call, if this run has measured it."""
        found = [figure.rows.get("nginx") for figure in self.figures if figure.name == "small/load"]
        return found[0] if found else None

    def _generators(self, case: Case) -> list[Generator]:
        if "wrk" in case.generators and machine.find_tool("wrk") is None:
            self.skip(f"{case.name}/wrk", "wrk is not installed")
            return [each for each in case.generators if each != "wrk"]
        return list(case.generators)

    def _sample(
        self,
        case: Case,
        target: Target,
        *,
        rate: float = 0.0,
        layout: machine.Layout | None = None,
    ) -> Sample:
        load = self._load(case, target, rate)
        return measure(load, target, layout or self.layout, workdir=self.workdir)

    def _load(self, case: Case, target: Target, rate: float = 0.0) -> Load:
        return Load(case.template(target), case.expect, case.connections, self.seconds, rate)

    def _interleave(
        self, targets: dict[str, Target], take: Callable[[Target], Sample], case: Case, label: str, *, rounds: int = 0
    ) -> dict[str, Row]:
        """Measure every candidate once per round; each round starts with a different one."""
        rows = {name: Row() for name in targets}
        rounds = rounds or self.rounds
        for turn in range(rounds):
            for name in _rotated(list(targets), turn):
                sample = take(targets[name])
                rows[name].samples.append(sample)
                self._print_sample(case, label, turn, rounds, name, sample)
        return rows

    def _print_sample(self, case: Case, label: str, turn: int, rounds: int, name: str, sample: Sample) -> None:
        print(f"  {label} {turn + 1}/{rounds}  {name:<10} {_describe(case, sample)}", flush=True)

    def _run_paired(self, case: Case) -> None:
        """All candidates at the same time: a slow phase of the machine is the same for each. Only their CPU times compare."""
        targets = self._ready(case)
        rows = {name: Row(shares_core=True) for name in targets}
        with ThreadPoolExecutor(len(targets) or 1) as threads:
            for _ in range(PAIRED_ROUNDS * self.rounds):
                samples = threads.map(partial(self._sample, case), targets.values())
                for row, sample in zip(rows.values(), samples, strict=True):
                    row.samples.append(sample)
                    row.values.append(sample.cpu_us_per_request)
        method = "all candidates are under load at the same time, on one core"
        self._show(Figure(case, case.name, case.title, case.unit, rows, case.aims, method))

    # --- latency ------------------------------------------------------------------------------------------------------

    def _run_latency(self, case: Case) -> None:
        targets = self._ready(case)
        if "nginx" not in targets:
            self.skip(case.name, "needs nginx, because the load is half of nginx's rate")
            return
        rate = self._nginx_rate(case, targets["nginx"]) / 2
        print(f"  at a fixed {rate:,.0f} calls/s", flush=True)
        take = partial(self._sample, case, rate=rate)
        rows = self._interleave(targets, take, case, "open loop", rounds=TAIL_ROUNDS * self.rounds)
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
        """nginx's rate from this run's small call, or from a separate measurement."""
        for figure in self.figures:
            if figure.name in ("small/load", "small") and "nginx" in figure.rows:
                return median(figure.rows["nginx"].values)
        load = Load(case.template(target), case.expect, 64, self.seconds)
        return measure(load, target, self.layout, workdir=self.workdir).per_second

    # --- overload -----------------------------------------------------------------------------------------------------

    def _run_overload(self, case: Case) -> None:
        """The share of the upstream's capacity that becomes answers, and how long those take."""
        capacity = LIMITED_AT_ONCE * 1000 / LIMITED_MS
        rate, seconds = OVERLOAD * capacity, max(self.seconds, OVERLOAD_S)

        def take(target: Target) -> Sample:
            load = Load(
                case.template(target), case.expect, case.connections, seconds, rate, warmup_s=1.0, refusals=True
            )
            return measure(load, target, self.layout, workdir=self.workdir)

        taken = self._interleave(self._ready(case), take, case, "open loop")
        parts: dict[str, tuple[str, Callable[[Sample], float]]] = {
            "goodput": ("% of capacity", lambda sample: 100 * sample.per_second / capacity),
            "p99": ("ms", lambda sample: sample.p99_us / 1000),
        }
        method = f"open loop at {rate:,.0f} calls/s over {case.connections} connections; refused calls have no latency"
        for name, (unit, read) in parts.items():
            rows = {candidate: Row([read(each) for each in row.samples]) for candidate, row in taken.items()}
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            self._show(Figure(case, f"{case.name}/{name}", f"{case.title}: {name}", unit, rows, aims, method))

    # --- mixed load and late replies ----------------------------------------------------------------------------------

    def _run_mixed(self, case: Case) -> None:
        """The p99 of small calls, alone and beside large replies and batches of the same account."""
        targets = self._ready(case)
        take = partial(self._sample, case, rate=MIXED_RATE)

        def take_mixed(target: Target) -> Sample:
            with beside(self._large_loads(case, target), target, self.layout.load, workdir=self.workdir):
                return take(target)

        rounds = TAIL_ROUNDS * self.rounds
        alone = self._interleave(targets, take, case, "alone", rounds=rounds)
        rows = self._interleave(targets, take_mixed, case, "mixed", rounds=rounds)
        if "penstock" in alone:
            rows[SMALL_ONLY] = alone["penstock"]
        for row in rows.values():
            row.values = [_p99(sample) for sample in row.samples]
        method = f"{MIXED_RATE:,.0f} small calls/s; the others have the time that load and stub leave of their core"
        self._show(Figure(case, case.name, case.title, case.unit, rows, case.aims, method))

    def _large_loads(self, case: Case, target: Target) -> list[Load]:
        seconds = self.seconds + OVERLOAD_S
        wanted: tuple[tuple[Callable[[], str], float], ...] = (
            (partial(bodies.code, bodies.BIG), MIXED_RATE / 10),
            (partial(bodies.code, LARGEST), MIXED_RATE / 90),
            (partial(bodies.batch, bodies.LARGE_BATCH), LARGE_BATCHES_RATE),
        )
        return [Load(replace(case, body=body).template(target), "", 8, seconds, rate) for body, rate in wanted]

    def _run_hedge(self, case: Case) -> None:
        """The time that a second call to another upstream saves, and how many more calls the upstreams get."""
        stubs = [self.candidates.stubs[name] for name in (case.stub, *service.PROFILES[case.profile].stubs)]
        extra: dict[Target, list[float]] = {}

        def take(target: Target) -> Sample:
            before = sum(stub.calls() for stub in stubs)
            load = Load(case.template(target), case.expect, case.connections, HEDGE_S, HEDGE_RATE, warmup_s=1.0)
            sample = measure(load, target, self.layout, workdir=self.workdir)
            sent = HEDGE_RATE * (HEDGE_S + load.warmup_s)
            extra.setdefault(target, []).append(100 * (sum(stub.calls() for stub in stubs) - before - sent) / sent)
            return sample

        targets = self._ready(case)
        rows = self._interleave(targets, take, case, "open loop")
        for row in rows.values():
            row.values = [_p99(sample) / 1000 for sample in row.samples]
        method = f"open loop at {HEDGE_RATE:,.0f} calls/s over {case.connections} connections; nginx does not hedge"
        parts = {"p99": ("ms", rows), "extra": ("% more calls", {name: Row(extra[targets[name]]) for name in rows})}
        for name, (unit, found) in parts.items():
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            self._show(Figure(case, f"{case.name}/{name}", f"{case.title}: {name}", unit, found, aims, method))

    # --- workers ------------------------------------------------------------------------------------------------------

    def _run_workers(self, case: Case) -> None:
        layout = self.pair or machine.Layout(
            (self.layout.service[0], self.layout.load), self.layout.load, self.layout.load, ""
        )
        stub = self.candidates.stubs[case.stub]
        stub.pin(layout.stub)
        try:
            rows = {name: row for name in case.candidates if (row := self._scale(case, name, layout))}
        finally:
            stub.pin(self.layout.stub)
        method = (
            layout.text
            if self.pair
            else "ESTIMATE: with fewer than four cores, load and stub share the workers' cores, so this is twice "
            "the calls per CPU second of two workers divided by that of one"
        )
        self.figures.append(
            Figure(case, case.name, case.title, case.unit, rows, case.aims, method, is_estimate=self.pair is None)
        )

    def _scale(self, case: Case, name: str, layout: machine.Layout) -> Row | None:
        """One worker and two, alternating; never both under load at the same time."""
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
                self.skip(f"{case.name}: {name}", str(error))
                continue
            rows[name] = Row([value])
            print(f"  {name:<10} {value:,.2f} {case.unit}", flush=True)
        method = "resident memory of the processes that listen on the candidate's port"
        if case.kind == "idle":
            method += f"; {count:,} connections"
        self.figures.append(Figure(case, case.name, case.title, case.unit, rows, case.aims, method))

    def _run_packed(self, case: Case) -> None:
        titles = {
            "kept": "never read again",
            "served": "a tenth of them read since the last head, also in gzip",
        }
        for name, value in memory.growth_per_byte_of_logs().items():
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            title = f"{case.title}: {titles[name]}"
            self._show(Figure(case, f"{case.name}/{name}", title, case.unit, {"penstock": Row([value])}, aims))

    def _memory_of(self, case: Case, target: Target, count: int) -> float:
        if case.kind == "idle":
            return memory.bytes_per_idle_connection(target, case, count) / 1024
        return memory.growth_per_cached_byte(target, case, self.layout, count=CACHED_REPLIES, workdir=self.workdir)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _run_admission(self, case: Case) -> None:
        """Measured once per run, without a service: the cases report figures of the same measurement."""
        if self._admission is None:
            self.candidates.keep_only(set())
            self._admission = admission.figures(self.workdir, (*self.layout.service, self.layout.load))
        for aim in case.aims:
            rows = {name: Row(values) for name, values in self._admission[aim.figure].items()}
            name = f"{case.name}/{aim.figure}" if len(case.aims) > 1 else case.name
            title = f"{case.title}{': ' + aim.figure if len(case.aims) > 1 else ''}"
            self._show(Figure(case, name, title, case.unit, rows, (aim,)))

    # --- the index of holdings ----------------------------------------------------------------------------------------

    def _run_index(self, case: Case) -> None:
        """Measure indexing in ranges (far from the head) and block by block (near it), each next to a bare COPY of its rows."""
        self.candidates.keep_only(set())
        found = holdings.rates(self.workdir, (self.layout.service[0], self.layout.load), self.rounds)
        for mode, rounds in found.items():
            rows = {name: Row([each[name] for each in rounds]) for name in case.candidates}
            for name, row in rows.items():
                print(f"  {mode:<8} {name:<10} {median(row.values):>10,.0f} {case.unit}", flush=True)
            aims = tuple(aim for aim in case.aims if aim.figure == mode)
            method = (
                "follower and Postgres on one core; copy: a bare COPY of the same rows into tables of the same shape"
            )
            self.figures.append(
                Figure(case, f"{case.name}/{mode}", f"{case.title}: {mode}", case.unit, rows, aims, method)
            )

    def _run_pages(self, case: Case) -> None:
        self.candidates.keep_only(set())
        for page, times in holdings.page_times(self.workdir).items():
            print(f"  {page:<10} median {times['median']:.2f}, p99 {times['p99']:.2f} {case.unit}", flush=True)
            aims = tuple(aim for aim in case.aims if aim.figure == page)
            rows = {"penstock": Row([times["p99"]])}
            title = f"{case.title}: {page}, p99 (median {times['median']:.2f} ms)"
            self.figures.append(Figure(case, f"{case.name}/{page}", title, case.unit, rows, aims))

    def _run_transfers(self, case: Case) -> None:
        """How fast the history is written, by the follower and by a back-fill, how large and fast to read it is, and what a
        back-fill costs the follower and calls."""
        self.candidates.keep_only(set())
        rates = holdings.rates(self.workdir, (self.layout.service[0], self.layout.load), self.rounds, kind="history")
        for mode, rounds in rates.items():
            rows = {
                name: Row([each[name] for each in rounds], note=_per_cpu_second(name, rounds))
                for name in holdings.TIMES
            }
            method = (
                "follower and Postgres on one core; copy: by the driver; binary copy: of rows that are encoded already"
            )
            self._show_part(case, mode, f"with holdings, in {mode}", case.unit, rows, method)
        self._run_backfills(case)
        self._run_beside_backfill(case)
        pages = transfers.page_times(self.workdir)
        rows = {FEW_TRANSFERS if name == "10" else name: Row([times["p99"]]) for name, times in pages.items()}
        rows["penstock"] = Row([max(times["p99"] for times in pages.values())])
        title = f"page of {transfers.PAGE} of an address among {transfers.ROWS:,} transfers, p99; penstock: the slowest address"
        self._show_part(case, "page", title, "ms in Postgres", rows)

    def _run_backfills(self, case: Case) -> None:
        done = [transfers.backfill(self.workdir) for _ in range(self.rounds)]
        rows = {"penstock": Row([each.rate for each in done], note=str(done[-1]))}
        for name, found in transfers.others(self.workdir) if self.peers else ():
            if isinstance(found, str):
                self.skip(f"{case.name}: {name}", found)
            else:
                rows[name] = Row([found.rate] * self.rounds, note=str(found))
        title = f"back-fill of {transfers.BLOCKS:,} blocks of {transfers.LOGS} logs, end to end on two cores"
        self._show_part(case, "backfill", title, "logs/s", rows)
        self._show_part(case, "bytes", "with indexes", "bytes each", {"penstock": Row([done[-1].bytes_each])})

    def _run_beside_backfill(self, case: Case) -> None:
        delays = transfers.lateness(self.workdir)
        rows = {NO_BACKFILL: Row([max(delays["alone"])]), "penstock": Row([max(delays["beside"])])}
        title = f"latest block of the follower beside a back-fill, {transfers.LIVE_LOGS:,} transfers in each block"
        self._show_part(case, "late", title, "s late", rows)
        target = self._ready(case).get("penstock")
        if target is None:
            return
        load = Load(case.template(target), case.expect, case.connections, max(self.seconds, ALONE_S), rate=BESIDE_RATE)

        def p99() -> float:
            return measure(load, target, self.layout, workdir=self.workdir).p99_us

        alone, beside = [], []
        for _ in range(self.rounds):
            alone.append(p99())
            with transfers.under_way(self.workdir, self.layout.service, self.layout.load):
                beside.append(p99())
        method = (
            f"{BESIDE_RATE:,} calls/s; the back-fill is on the service's core, its database and upstream on the other"
        )
        rows = {NO_BACKFILL: Row(alone), "penstock": Row(beside)}
        self._show_part(case, "calls", "p99 of calls beside a back-fill", "µs (p99)", rows, method)

    def _show_part(self, case: Case, name: str, title: str, unit: str, rows: dict[str, Row], method: str = "") -> None:
        """One of several figures of a case."""
        aims = tuple(aim for aim in case.aims if aim.figure == name)
        self._show(Figure(case, f"{case.name}/{name}", f"{case.title}: {title}", unit, rows, aims, method))

    def _run_balances(self, case: Case) -> None:
        self.candidates.keep_only(set())
        found = balances.figures(self.workdir, (self.layout.service[0], self.layout.load))
        for aim in case.aims:
            unit = "upstream calls" if aim.figure == "calls" else case.unit
            print(f"  {aim.figure:<10} {found[aim.figure]:.2f} {unit}", flush=True)
            rows = {"penstock": Row([found[aim.figure]])}
            self.figures.append(
                Figure(case, f"{case.name}/{aim.figure}", f"{case.title}: {aim.figure}", unit, rows, (aim,))
            )

    # --- the cost matrix ----------------------------------------------------------------------------------------------

    def _run_costs(self, case: Case) -> None:
        """Once: each cell is repeated where its step was slow."""
        self.candidates.keep_only(set())
        found = costs.measure(max(self.seconds, COSTS_S))
        costs.write(found)
        figures = found.figures()
        for aim in case.aims:
            title, unit = costs.TITLES[aim.figure]
            rows = {"penstock": Row([figures[aim.figure]])}
            self._show(Figure(case, f"{case.name}/{aim.figure}", f"{case.title}: {title}", unit, rows, (aim,)))

    # --- usage --------------------------------------------------------------------------------------------------------

    def _run_usage(self, case: Case) -> None:
        """Cost per call in every round; charts once, since filling the table takes minutes."""
        self.candidates.keep_only(set())
        rows = {"count": [usage.microseconds() for _ in range(self.rounds)]}
        rows |= {name: [taken] for name, taken in usage.chart_times(self.workdir).items()}
        for aim in case.aims:
            unit = "µs/call" if aim.figure in ("count", "flush") else case.unit
            print(f"  {aim.figure:<10} {median(rows[aim.figure]):.2f} {unit}", flush=True)
            figures = {"penstock": Row(rows[aim.figure])}
            title = usage.TITLES[aim.figure]
            self.figures.append(Figure(case, f"{case.name}/{aim.figure}", title, unit, figures, (aim,)))

    # --- failing upstreams --------------------------------------------------------------------------------------------

    def _run_faults(self, case: Case) -> None:
        tails = faults.slowest(self.rounds)
        note = "slowest with " + ", ".join(sorted({tail.mode for tail in tails}))
        rows = {
            ALL_HEALTHY: Row([tail.healthy for tail in tails]),
            "penstock": Row([tail.failing for tail in tails], note=note),
        }
        self._show_rows(case, rows)

    # --- records and verification -------------------------------------------------------------------------------------

    def _run_records(self, case: Case) -> None:
        found = [records.costs() for _ in range(self.rounds)]
        for name in found[0]:
            rows = {"penstock": Row([each[name] for each in found])}
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            self._show(Figure(case, f"{case.name}/{name}", f"{case.title}: {name}", case.unit, rows, aims))

    def _run_spans(self, case: Case) -> None:
        self.candidates.keep_only(set())
        stub = self.candidates.stubs["small"].url
        found = spans.costs(self.rounds, upstream=stub, collector=f"{stub}/v1/traces")
        for aim in case.aims:
            rows = {row: Row([each[aim.figure][row] for each in found]) for row in (NO_TRACES, "penstock")}
            title = f"{case.title}: {aim.figure}"
            self._show(Figure(case, f"{case.name}/{aim.figure}", title, case.unit, rows, (aim,)))

    def _run_verify(self, case: Case) -> None:
        self.candidates.keep_only(set())
        found = verified.costs(self.rounds)
        for name in found[0]:
            for aim in case.aims:
                kinds = {NOT_VERIFIED: NOT_VERIFIED, "penstock": aim.figure}
                rows = {row: Row([each[name][kind] for each in found]) for row, kind in kinds.items()}
                title = f"{case.title}: {name}, {aim.figure}"
                self._show(Figure(case, f"{case.name}/{name}-{aim.figure}", title, case.unit, rows, (aim,)))

    # --- sponsorship --------------------------------------------------------------------------------------------------

    def _run_sponsor(self, case: Case) -> None:
        """Sequential requests for the latency, concurrent ones for the rate."""
        self.candidates.keep_only(set())
        found = sponsor.figures(self.workdir, self.layout.service[0], rounds=self.rounds, seconds=self.seconds)
        signing = f"signing takes {median(each['signing'] for each in found):.0%} of the worker's CPU"
        for name, unit in (("p50", case.unit), ("rate", "requests/s")):
            values = [each[name] for each in found]
            print(f"  {name:<10} {median(values):,.2f} {unit}; {signing}", flush=True)
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            title = f"{case.title}: {name}; {signing}"
            self.figures.append(Figure(case, f"{case.name}/{name}", title, unit, {"penstock": Row(values)}, aims))

    # --- webhooks -----------------------------------------------------------------------------------------------------

    def _run_delivery(self, case: Case) -> None:
        """Deliveries per second next to a bare client's, the delay until a POST, and the memory taken by a long queue."""
        self.candidates.keep_only(set())
        found = delivery.figures(self.workdir, (self.layout.service[0], self.layout.load), self.rounds)
        columns = {name: [each[name] for each in found if name in each] for name in found[-1]}
        rate = {"penstock": Row(columns["penstock"]), BARE_CLIENT: Row(columns["bare"])}
        for name, unit, rows in (
            ("rate", case.unit, rate),
            ("lag", "ms from transaction to POST", {"penstock": Row(columns["lag_ms"])}),
            ("memory", "MiB added by 1,000,000 waiting deliveries", {"penstock": Row(columns["memory_mib"])}),
        ):
            for candidate, row in rows.items():
                print(f"  {name:<8} {candidate:<12} {median(row.values):>10,.1f} {unit}", flush=True)
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            method = "deliverer and Postgres on one core, receiver on another; 32 webhooks"
            self.figures.append(Figure(case, f"{case.name}/{name}", f"{case.title}: {name}", unit, rows, aims, method))

    # --- sockets ------------------------------------------------------------------------------------------------------

    def _run_fan(self, case: Case) -> None:
        """Server and clients run for the whole case; only sending is measured."""
        self.candidates.keep_only(set())
        sizes = (1_000, case.connections) if case.kind == "fanout" else (case.connections,)
        for wanted in sizes:
            count = memory.connections_possible(wanted)
            with contextlib.ExitStack() as stack:
                sends: dict[str, Callable[..., float]] = {}
                for name in case.candidates:
                    try:
                        sends[name] = stack.enter_context(sockets.fan(name, count, self.layout))
                    except StartFailed as error:
                        self.skip(f"{case.name}: {name}", str(error))
                rows = self._fan_rows(case, sends)
            name = f"{case.name}/{wanted}" if len(sizes) > 1 else case.name
            method = f"{count:,} sockets; CPU time of the sending process, clients on another core"
            self._show(Figure(case, name, f"{case.title}: {count:,} sockets", case.unit, rows, case.aims, method))

    def _fan_rows(self, case: Case, sends: dict[str, Callable[..., float]]) -> dict[str, Row]:
        """Measure every candidate once per round; each round starts with a different one."""
        ways = {name: partial(send) for name, send in sends.items()}
        if case.kind == "turn":
            many = sockets.IN_A_TURN
            ways = {ONE_IN_A_TURN: partial(sends["penstock"], rounds=many)} if "penstock" in sends else {}
            ways |= {name: partial(send, rounds=5 * many, together=many) for name, send in sends.items()}
        rows = {name: Row() for name in ways}
        for turn in range(self.rounds):
            for name in _rotated(list(ways), turn):
                rows[name].values.append(1e6 / ways[name]())
        return rows

    def _run_sockets(self, case: Case) -> None:
        target = self._ready(case).get("penstock")
        if target is None:
            return
        load = Load(case.template(target), case.expect, 64, self.seconds, rate=BESIDE_RATE)

        def p99() -> float:
            return measure(load, target, self.layout, workdir=self.workdir).p99_us

        count = memory.connections_possible(case.connections)
        try:
            found = sockets.crowd(target, count, self.layout, p99, rounds=self.rounds)
        except StartFailed as error:
            self.skip(case.name, str(error))
            return
        parts = {
            "memory": ("KB/socket", {"penstock": Row([found.kilobytes])}),
            "last": ("ms", {"penstock": Row(found.spreads_ms)}),
            "calls": ("µs (p99)", {NO_SOCKETS: Row(found.p99_alone_us), "penstock": Row(found.p99_beside_us)}),
        }
        titles = {
            "memory": "memory per socket",
            "last": "delay between the first and the last socket to get a head",
            "calls": f"p99 of {BESIDE_RATE:,} calls/s at the same time",
        }
        for name, (unit, rows) in parts.items():
            aims = tuple(aim for aim in case.aims if aim.figure == name)
            title = f"{case.title}: {titles[name]}"
            method = f"{count:,} sockets subscribed to newHeads, a block every 2 s"
            self._show(Figure(case, f"{case.name}/{name}", title, unit, rows, aims, method))

    def _run_attacks(self, case: Case) -> None:
        target = self._ready(case).get("penstock")
        if target is None:
            return
        workers = machine.listeners(target.port)

        def take(seconds: float) -> Sample:
            load = Load(case.template(target), case.expect, case.connections, seconds, rate=BESIDE_RATE)
            return measure(load, target, self.layout, workdir=self.workdir)

        outcomes: list[attacks.Outcome] = []
        for name in self.attacks or attacks.TITLES:
            alone, beside, growth, replies = Row(), Row(), [], Counter[str]()
            for _ in range(self.rounds):
                alone.samples.append(take(min(self.seconds, ALONE_S)))
                machine.forget_peaks(workers)
                before = machine.resident_bytes(workers)
                with attacks.under_way(name, target, self.layout.load, replies):
                    beside.samples.append(take(self.seconds))
                growth.append((machine.peak_bytes(workers) - before) / 2**20)
            for row in (alone, beside):
                row.values = [_p99(sample) for sample in row.samples]
            self._show_attack(case, name, attacks.TITLES[name], {NO_ATTACK: alone, "penstock": beside}, growth)
            outcomes.append(attacks.Outcome(name, alone.samples, beside.samples, growth, replies))
        print("\n" + attacks.table(outcomes), flush=True)

    def _show_attack(self, case: Case, name: str, title: str, rows: dict[str, Row], growth: list[float]) -> None:
        method = f"{BESIDE_RATE:,} calls/s; the attack has the time that load and stub leave of their core"
        of_one = name in attacks.FREE and name != attacks.CROWD
        p99, memory = ("crowd" if name == attacks.CROWD else ""), ("memory of one" if of_one else "memory")
        by_figure = {figure: tuple(aim for aim in case.aims if aim.figure == figure) for figure in (p99, memory)}
        title = f"{case.title}: {title}"
        self._show(Figure(case, f"{case.name}/{name}", title, case.unit, rows, by_figure[p99], method))
        grown = {"penstock": Row(growth)}
        title = f"growth of the worker's resident memory: {title}"
        self._show(Figure(case, f"{case.name}/{name}/memory", title, "MiB", grown, by_figure[memory]))

    def _show_rows(self, case: Case, rows: dict[str, Row]) -> None:
        """The figure of a case that has only one."""
        self._show(Figure(case, case.name, case.title, case.unit, rows, case.aims))

    def _show(self, figure: Figure) -> None:
        for name, row in figure.rows.items():
            if row.values:
                print(f"  {figure.name:<14} {name:<15} {median(row.values):,.2f} {figure.unit}", flush=True)
        self.figures.append(figure)

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _ready(self, case: Case) -> dict[str, Target]:
        """Return the case's candidates that run and reply; record why the others were skipped."""
        names = list(case.candidates)
        if case.stub == "small" and case.kind in ("rate", "latency"):
            names += list(self.candidates.peers)  # a peer's upstream is fixed: the small stub
        names += self.peers if case.has_peers else ()
        self.candidates.keep_only({self.candidates.member(name, case) for name in names})
        found = {name: self._try(case, name, cpus=self.layout.service) for name in names}
        return {name: target for name, target in found.items() if target is not None}

    def _try(self, case: Case, name: str, *, cpus: tuple[int, ...], workers: int = 1) -> Target | None:
        try:
            target = self.candidates.target(self.candidates.member(name, case, workers=workers), cpus)
            if name in self.peers:
                self._wait_for(target, case)
            x_cache = [probe(target, case, next(self._numbers)) for _ in range(2)][-1]
            if name == "penstock" and case.cache and x_cache != case.cache:
                raise StartFailed(f"X-Cache is {x_cache or 'missing'}, but the case needs {case.cache}")
        except StartFailed as error:
            self.skip(f"{case.name}: {name}", str(error))
            return None
        return target

    def _wait_for(self, target: Target, case: Case) -> None:
        """Some gateways listen before they have checked their upstreams, and refuse calls until then."""
        deadline = time.monotonic() + PEER_READY_S
        while True:
            try:
                probe(target, case, next(self._numbers))
                return
            except StartFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def skip(self, what: str, why: str) -> None:
        print(f"  SKIPPED {what}: {why}", flush=True)
        self.skips.append(Skip(what, why))


# How each kind of case runs.
RUNS: Mapping[Kind, Callable[[Runner, Case], None]] = {
    "rate": Runner._run_rates,
    "bytes": Runner._run_rates,
    "cpu": Runner._run_rates,
    "paired": Runner._run_paired,
    "latency": Runner._run_latency,
    "workers": Runner._run_workers,
    "idle": Runner._run_memory,
    "cached": Runner._run_memory,
    "packed": Runner._run_packed,
    "admission": Runner._run_admission,
    "index": Runner._run_index,
    "pages": Runner._run_pages,
    "transfers": Runner._run_transfers,
    "balances": Runner._run_balances,
    "sponsor": Runner._run_sponsor,
    "delivery": Runner._run_delivery,
    "fanout": Runner._run_fan,
    "turn": Runner._run_fan,
    "sockets": Runner._run_sockets,
    "matching": Runner._run_matching,
    "upstreams": Runner._run_upstreams,
    "usage": Runner._run_usage,
    "faults": Runner._run_faults,
    "overload": Runner._run_overload,
    "mixed": Runner._run_mixed,
    "hedge": Runner._run_hedge,
    "attacks": Runner._run_attacks,
    "records": Runner._run_records,
    "spans": Runner._run_spans,
    "verify": Runner._run_verify,
    "filters": Runner._run_filters,
    "costs": Runner._run_costs,
}


def _per_cpu_second(name: str, rounds: Sequence[Mapping[str, float]]) -> str:
    return f"{median(each[f'{name}_cpu'] for each in rounds):,.0f} per CPU second"


def _rotated(names: Sequence[str], by: int) -> list[str]:
    at = by % len(names) if names else 0
    return [*names[at:], *names[:at]]


def _rate(case: Case, sample: Sample) -> float:
    if case.kind == "cpu":
        return sample.cpu_us_per_request
    return sample.bytes_per_second / 1e6 if case.kind == "bytes" else sample.per_second * case.calls_per_request


def _p50(sample: Sample) -> float:
    return sample.p50_us


def _p99(sample: Sample) -> float:
    return sample.p99_us


def _describe(case: Case, sample: Sample) -> str:
    if case.kind in ("latency", "mixed", "hedge"):
        figure = f"p50 {sample.p50_us:,.0f} µs, p99 {sample.p99_us:,.0f} µs"
    else:
        unit = "calls/s" if case.kind == "workers" else case.unit
        figure = f"{_rate(case, sample):>10,.0f} {unit}, {sample.cpu_us_per_request:.1f} µs of CPU each"
    trouble = (f", {sample.faults} FAULTS" if sample.faults else "") + (f", {sample.late} late" if sample.late else "")
    return figure + trouble
