"""The cost matrix: every input of the API in hostile shapes, and what the dearest of each operation costs.

The cells and the bounds are those of `tests/costs`, of which `make test` sends a part. The table has the dearest input of each
operation: the one that comes nearest to one of its bounds, or exceeds it by most.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import memory_disk
from tests.costs import cells
from tests.costs.driver import MAX_GROWTH, MAX_STEP_MS, MAX_WRITTEN, WRITTEN_ANYWAY, Cost, Driver, allowed_for
from tests.costs.service import running_service
from tests.database import running

TABLE = Path(__file__).parent / "costs.md"
HEADS = (
    "Operation",
    "Dearest input",
    "Bytes",
    "Units",
    "Step ms",
    "Growth MiB",
    "Written KiB",
    "Upstream calls",
    "List price",
)
TITLES = {
    "step": ("longest step of the event loop", "ms CPU"),
    "growth": ("growth of the worker", "MiB"),
    "written": ("write-ahead log per unit", "KiB"),
    "price": ("list price of upstream calls per unit charged", "×"),
    "failed": ("inputs after which something failed, was lost or was not given back", "inputs"),
}
INTRODUCTION = """\
# The dearest input of each operation

`make bench ARGS=costs` writes this file. Each operation got every hostile input of the cost matrix (`tests/costs`), from a Free
account; the row shows the one that comes nearest to a bound. Bounds: {step:g} ms of CPU time in one step of the event loop,
{growth} MiB of memory, {written} KiB of Postgres's write-ahead log per unit, and upstream calls with a list price up to the
units charged. Steps below 1 ms are shown as 0. Operations of signed-in people cost no units: each request counts as one.
[README.md](README.md) explains the method.
"""


@dataclass(slots=True)
class Matrix:
    costs: list[Cost] = field(default_factory=list)
    # Whether records, usage and deliveries of another account were still written in the end.
    is_alive: bool = True

    def figures(self) -> dict[str, float]:
        """The dearest of all cells, by bound."""
        return {
            "step": max(cost.step_ms for cost in self.costs),
            "growth": max(cost.growth for cost in self.costs) / 2**20,
            "written": max(_written_per_unit(cost) for cost in self.costs) / 1024,
            "price": max(cost.list_price / max(1, cost.units) for cost in self.costs),
            "failed": sum(1.0 for cost in self.costs if {"failed", "lost", "kept"} & set(cost.faults()))
            + (not self.is_alive),
        }

    def dearest(self) -> list[Cost]:
        """One cell of each row."""
        found: dict[str, Cost] = {}
        for cost in self.costs:
            if cost.row not in found or share_of(cost) > share_of(found[cost.row]):
                found[cost.row] = cost
        return [*found.values()]


def share_of(cost: Cost) -> float:
    """How much of its tightest bound a cell uses."""
    return max(
        cost.step_ms / MAX_STEP_MS,
        cost.growth / MAX_GROWTH,
        _written_per_unit(cost) / MAX_WRITTEN,
        cost.list_price / max(1, cost.units),
    )


def _written_per_unit(cost: Cost) -> float:
    return max(0, cost.written - WRITTEN_ANYWAY - allowed_for(cost.values)) / max(1, cost.units)


def measure(seconds: float) -> Matrix:
    """Send every cell to a service of its own. `seconds`: how long subscriptions are held."""
    memory_disk.use()
    return asyncio.run(_measure(seconds))


async def _measure(seconds: float) -> Matrix:
    found = Matrix()
    with tempfile.TemporaryDirectory(prefix="penstock-costs-") as home:
        async with running() as server, running_service(server.url("penstock"), Path(home)) as service:
            driver = Driver(service)
            await driver.prepare()
            rows, subscriptions = [*cells.rows()], [*cells.subscriptions()]
            progress = Progress(len(rows) + len(subscriptions))
            for row in rows:
                costs = [cost async for cost in driver.measure(row, short=False)]
                found.costs += costs
                progress.show(row.name, costs)
            for each in subscriptions:
                cost = await driver.measure_subscriptions(each, seconds=seconds)
                found.costs.append(cost)
                progress.show(each.name, [cost])
            is_recorded = not await driver.unrecorded()
            found.is_alive = is_recorded and await driver.is_usage_written() and await driver.is_delivered()
    return found


class Progress:
    """Prints a line for each row of the matrix, and one for each cell above a bound."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._done = 0
        self._began = time.monotonic()

    def __repr__(self) -> str:
        return f"<Progress {self._done} of {self._rows} rows>"

    def show(self, row: str, costs: Sequence[Cost]) -> None:
        self._done += 1
        longest = max((cost.step_ms for cost in costs), default=0.0)
        passed_s = time.monotonic() - self._began
        print(
            f"  {passed_s:4.0f} s, {self._done} of {self._rows}: {row}, {len(costs)} inputs, {longest:.1f} ms",
            flush=True,
        )
        for cost in costs:
            if faults := ", ".join(cost.faults()):
                lost = f" {cost.lost}" if cost.lost else ""
                print(f"  ABOVE A BOUND ({faults}{lost}): {' | '.join(_cells(cost))}", flush=True)


def write(matrix: Matrix, path: Path = TABLE) -> None:
    path.write_text(text(matrix.dearest()))


def text(costs: Iterable[Cost]) -> str:
    bounds = {"step": MAX_STEP_MS, "growth": MAX_GROWTH >> 20, "written": MAX_WRITTEN >> 10}
    rows = [HEADS, ("---",) * len(HEADS), *map(_cells, costs)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([INTRODUCTION.format(**bounds), *lines]) + "\n"


def _cells(cost: Cost) -> tuple[str, ...]:
    return (
        cost.row,
        cost.shape,
        f"{cost.size:,}",
        f"{cost.units:,}",
        f"{cost.step_ms:.1f}",
        f"{cost.growth / 2**20:.1f}",
        f"{cost.written / 1024:.0f}",
        f"{cost.calls.total():,}",
        f"{cost.list_price:,}",
    )
