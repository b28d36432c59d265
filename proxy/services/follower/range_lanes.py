"""Read ranges of blocks from several upstreams at once, each within its own limits.

Each upstream is a *lane*: a reader that calls this upstream only, with the size of ranges that it serves and the number of
ranges that it reads at once. A lane that succeeds reads more at once; one that fails reads half as many, after a pause. A range
that a lane could not read, or whose logs contradict the bloom filter of a block, goes to the other lanes first. A range that
no lane can read is set aside as a gap, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from proxy.services.follower.block_reader import BlockReader, ReadFailed

# Ranges that one lane, and all of them, read or hold at once: bounds memory and the load of an upstream.
MOST_PER_LANE, MOST_AHEAD = 4, 8
# Pauses of a lane after a failure.
PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
# Failures of a range on each lane after which it is a gap, and gaps in a row after which the upstreams count as unavailable.
TRIES, GAPS_IN_A_ROW = 4, 3


class BlockRange(Protocol):
    """A frozen dataclass with these members."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


R = TypeVar("R")
P = TypeVar("P", bound=BlockRange)


@dataclass(slots=True)
class RangeWork(Generic[P]):
    """A range, and how often each lane has failed to read it."""

    part: P
    failures: Counter[str] = field(default_factory=Counter)
    reason: str = ""


class WorkList(Generic[P]):
    """The ranges that are left to read."""

    def __init__(self, parts: Iterable[P]) -> None:
        self._parts = deque(parts)
        self._returned: list[RangeWork[P]] = []
        self.gaps: list[RangeWork[P]] = []

    def __repr__(self) -> str:
        return f"<WorkList of {len(self._parts)} parts, {len(self._returned)} to repeat, {len(self.gaps)} gaps>"

    def __bool__(self) -> bool:
        return bool(self._parts or self._returned)

    def take(self, lane: str, lanes: Sequence[str], size: Callable[[P], int]) -> RangeWork[P] | None:
        """The next range for a lane: one that other lanes failed to read, or the next `size` blocks."""
        for work in self._returned:
            if work.failures[lane] <= min(work.failures[each] for each in lanes):
                self._returned.remove(work)
                return work
        if not self._parts:
            return None
        part = self._parts.popleft()
        last = min(part.first + size(part) - 1, part.last)
        if last < part.last:
            self._parts.appendleft(replace(part, first=last + 1))  # type: ignore[type-var]
        return RangeWork(replace(part, last=last))  # type: ignore[type-var]

    def failed(self, work: RangeWork[P], lane: str, lanes: Sequence[str], reason: str) -> bool:
        """A lane could not read it. Returns whether it is a gap now."""
        work.failures[lane] += 1
        work.reason = reason
        is_gap = all(work.failures[each] >= TRIES for each in lanes)
        (self.gaps if is_gap else self._returned).append(work)
        return is_gap


class UpstreamLane:
    """One upstream. `width`: the number of ranges that it may read at once."""

    def __init__(self, name: str, reader: BlockReader) -> None:
        self.name = name
        self.reader = reader
        self.width = 1
        self.under_way = 0
        self.resumes_at = 0.0
        self._pause_s = PAUSE_S

    def __repr__(self) -> str:
        return f"<UpstreamLane {self.name}, {self.under_way} of {self.width}>"

    def has_room(self, now: float) -> bool:
        return self.under_way < self.width and now >= self.resumes_at

    def began(self) -> None:
        self.under_way += 1

    def succeeded(self) -> None:
        self.under_way -= 1
        self.width = min(self.width + 1, MOST_PER_LANE)
        self._pause_s = PAUSE_S

    def failed(self, now: float) -> None:
        self.under_way -= 1
        self.width = max(1, self.width // 2)
        self.resumes_at = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)


class LaneReader(Generic[P, R]):
    """Reads all ranges of a list, in any order."""

    def __init__(
        self,
        lanes: Sequence[UpstreamLane],
        read: Callable[[BlockReader, P], Awaitable[R]],
        size: Callable[[BlockReader, P], int],
    ) -> None:
        self._lanes = lanes
        self._names = [lane.name for lane in lanes]
        self._read = read
        self._size = size

    def __repr__(self) -> str:
        return f"<LaneReader of {self._lanes}>"

    async def ranges(self, work: WorkList[P], group: asyncio.TaskGroup) -> AsyncIterator[list[R]]:
        """The data of all ranges, as many at once as are ready. Raises ReadFailed if the upstreams are unavailable. Reading, in
        tasks of the group, goes on while the caller writes."""
        under_way: dict[asyncio.Task[R | ReadFailed], tuple[UpstreamLane, RangeWork[P]]] = {}
        gaps = 0
        while work or under_way:
            self._start(work, under_way, group)
            await _any_done(under_way)
            ready: list[R] = []
            failure: ReadFailed | None = None
            for task in [each for each in under_way if each.done()]:
                lane, range_work = under_way.pop(task)
                outcome = task.result()
                if not isinstance(outcome, ReadFailed):
                    lane.succeeded()
                    gaps = 0
                    ready.append(outcome)
                    continue
                lane.failed(asyncio.get_running_loop().time())
                gaps += work.failed(range_work, lane.name, self._names, str(outcome))
                if gaps >= GAPS_IN_A_ROW:
                    failure = outcome
            if ready:
                self._start(work, under_way, group)
                yield ready
            if failure is not None:
                raise failure

    def _start(
        self,
        work: WorkList[P],
        under_way: dict[asyncio.Task[R | ReadFailed], tuple[UpstreamLane, RangeWork[P]]],
        group: asyncio.TaskGroup,
    ) -> None:
        """Give ranges to the lanes that have room, the least busy first."""
        now = asyncio.get_running_loop().time()
        while len(under_way) < MOST_AHEAD:
            for lane in sorted(self._lanes, key=lambda each: each.under_way):
                range_work = self._next(work, lane) if lane.has_room(now) else None
                if range_work is not None:
                    lane.began()
                    under_way[group.create_task(self._attempt(lane, range_work.part))] = lane, range_work
                    break
            else:
                return

    def _next(self, work: WorkList[P], lane: UpstreamLane) -> RangeWork[P] | None:
        return work.take(lane.name, self._names, lambda part: self._size(lane.reader, part))

    async def _attempt(self, lane: UpstreamLane, part: P) -> R | ReadFailed:
        """Return a failure as a value: raised in the task group it would cancel the other reads."""
        try:
            return await self._read(lane.reader, part)
        except ReadFailed as exc:
            return exc


async def _any_done(tasks: Iterable[asyncio.Task[R]]) -> None:
    """Wait for a task, or a moment: a lane may end its pause."""
    if waited_for := [*tasks]:
        await asyncio.wait(waited_for, timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(PAUSE_S / 2)
