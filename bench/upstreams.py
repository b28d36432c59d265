"""The case `upstreams`: what trying, knowing and billing upstreams costs, and whether it is right.

Its parts are the cost of a trial for clients (`shadow.py`); planted differences between two geth nodes; the bounds of a pruned
and an archive geth; credits and a budget against stub providers that count their calls by themselves; choosing by price
(`routing_costs.py`); and, beside another checkout, the instructions of calls when nothing of this is configured. All but the
first and the last two are measured by code of the tests.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench import machine, routing_costs, shadow
from bench.cases import NO_TRIAL, OTHER_CHECKOUT
from bench.instructions import ROOT, instructions
from bench.processes import StartFailed
from proxy.core.data_bounds import DATA_KINDS
from tests import database, memory_disk, node_programs
from tests.budget_hosts import billed_of_budget
from tests.metered_calls import mixed_calls
from tests.planted_differences import planted_reads
from tests.real_bounds import bounds_of, pruned_and_archive
from tests.real_nodes import geth_nodes

# Turns of each worker for a round of the bench.
TURNS = 10
# Reads and calls of a usual run, and of a full one.
MANY, FULL = 20_000, 100_000
LIMIT = 10_000
# Values of a figure by what was measured: Penstock, or what it is compared with.
Rows = Mapping[str, list[float]]
# The figures, with their title and unit.
FIGURES = {
    "p99": ("copies of a tenth of the reads for a candidate: p99 of clients", "µs"),
    "cpu": ("copies of a tenth of the reads for a candidate: CPU time per call", "µs CPU"),
    "missed": ("planted differences between two geth nodes that were not reported", "reads"),
    "false": ("other reads between two geth nodes that were reported", "reads"),
    "bounds": ("bounds of a pruned and an archive geth that are not exact", "bounds"),
    "bound-calls": ("calls that finding all bounds of a geth took", "calls"),
    "refresh": ("calls that confirming a bound took", "calls"),
    "credits": ("credits counted more or less than providers bill for mixed calls", "credits"),
    "above": ("credits billed above a budget over three hosts", "credits"),
    "unused": ("budget over three hosts that is left", "%"),
    "cost": ("a made-up day on an own node and three providers, chosen by price", "US$ per million calls"),
    "cost-p99": ("the same day: p99", "ms"),
    "small": ("small call without any of this", "instructions"),
    "hit": ("cache hit without any of this", "instructions"),
    "batch": ("batch of 20 without any of this", "instructions"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """`full`: with as many reads and calls as the aims are about. `other`: a checkout to compare instructions with."""

    layout: machine.Layout
    workdir: Path
    rounds: int
    full: bool = False
    other: Path | None = None

    @property
    def count(self) -> int:
        return FULL if self.full else MANY


def parts() -> Iterator[tuple[str, Callable[[Run], Mapping[str, Rows]]]]:
    """Each with its name."""
    yield "trial", _trial
    yield "planted differences", _planted
    yield "bounds", _bounds
    yield "credits", _credits
    yield "budget", _budget
    yield "price", _price
    yield "instructions", _instructions


def _trial(run: Run) -> Mapping[str, Rows]:
    without, beside = shadow.turns(run.layout, run.workdir, TURNS * run.rounds)
    if faults := sum(sample.faults for sample in (*without, *beside)):
        raise StartFailed(f"{faults} calls failed")
    return {
        "p99": {NO_TRIAL: [each.p99_us for each in without], "penstock": [each.p99_us for each in beside]},
        "cpu": {
            NO_TRIAL: [each.cpu_us_per_request for each in without],
            "penstock": [each.cpu_us_per_request for each in beside],
        },
    }


def _planted(run: Run) -> Mapping[str, Rows]:
    _require_geth()
    with tempfile.TemporaryDirectory(dir=run.workdir) as directory, geth_nodes(2, Path(directory)) as nodes:
        found = uvloop.run(planted_reads(nodes, run.count))
    print(f"  {found.planted:,} planted in {found.reads:,} reads, {found.skipped} skipped", flush=True)
    return {"missed": _alone(found.missed), "false": _alone(found.false)}


def _bounds(run: Run) -> Mapping[str, Rows]:
    _require_geth()
    with tempfile.TemporaryDirectory(dir=run.workdir) as directory, pruned_and_archive(Path(directory)) as nodes:
        found = uvloop.run(bounds_of(nodes))
    return {
        "bounds": _alone(len(found.wrong)),
        "bound-calls": _alone(max(found.calls)),
        "refresh": _alone(max(found.calls_to_refresh) / len(DATA_KINDS)),
    }


def _credits(run: Run) -> Mapping[str, Rows]:
    async def difference() -> int:
        async with mixed_calls(run.count) as harness:
            print(
                f"  {sum(each.billed_calls for each in harness.stubs):,} attempts for {run.count:,} calls", flush=True
            )
            return sum(abs(one - other) for one, other in zip(harness.counted, harness.billed, strict=True))

    return {"credits": _alone(uvloop.run(difference()))}


def _budget(_: Run) -> Mapping[str, Rows]:
    async def billed() -> int:
        async with database.running_with_template() as server:
            return await billed_of_budget(server, LIMIT)

    memory_disk.use()
    spent = asyncio.run(billed())
    return {"above": _alone(max(0, spent - LIMIT)), "unused": _alone(100 * max(0, LIMIT - spent) / LIMIT)}


def _price(run: Run) -> Mapping[str, Rows]:
    found = routing_costs.rounds(run.rounds)
    return {"cost": found["cost"], "cost-p99": found["p99"]}


def _instructions(run: Run) -> Mapping[str, Rows]:
    if run.other is None:
        raise StartFailed("needs --against, and valgrind")
    checkouts = {OTHER_CHECKOUT: run.other, "penstock": ROOT}
    return {
        case: {name: [instructions(case, root).total()] for name, root in checkouts.items()}
        for case in ("small", "hit", "batch")
    }


def _alone(value: float) -> Rows:
    return {"penstock": [float(value)]}


def _require_geth() -> None:
    if node_programs.find("geth") is None:
        raise StartFailed("geth is not installed: build it with `make geth`")
