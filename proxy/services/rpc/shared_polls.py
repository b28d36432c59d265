"""The polls of one network's upstreams by all processes of the host, so that each upstream is polled by one of them.

There is no leader. A process polls an upstream when the last poll is older than the interval at which it needs one; the
process that made that poll does so at once, the others a moment later. So the same process keeps polling while it can and
needs to, another one takes over within a moment if it dies, and one whose network comes into use takes over at once.

The findings are written to the host's memory (`PollTable`). The other processes read them there and apply them as if they
had polled. If an upstream was silent, each process polls for itself: the cause may be the process that polled.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from proxy.chains.lookups import ReportedBlock
from proxy.chains.registry import Network
from proxy.core.upstream_health import UpstreamHealth
from proxy.store.shared_memory.poll_table import HeadPoll, PollRecord, PollTable

# Two polls of an upstream are at least this far apart.
SHORTEST_S = 0.5
# A process that is alive polls within this time after it is due.
GRACE_S = 0.25

_NEVER = HeadPoll(0, -math.inf)


class SharedPolls:
    def __init__(self, network: Network, healths: Sequence[UpstreamHealth], table: PollTable | None = None) -> None:
        """Without a table, this process polls for itself."""
        self._me = secrets.randbits(62)
        self._table = table
        self._seen_changes = -1
        self._last = dict.fromkeys(healths, _NEVER)
        # A record's name contains what its findings depend on: the upstream and the chain that it should serve.
        names = {health: f"{health.upstream_id} {network.identity}" for health in healths}
        self._records = {} if table is None else {health: table.record(name) for health, name in names.items()}
        self._anchor_record = None if table is None else table.record(f"{network.id} {network.identity}")
        self._anchor: tuple[int, str] | None = None
        self._bounds = (
            {} if table is None else {health: table.record(f"{name} bounds") for health, name in names.items()}
        )

    def __repr__(self) -> str:
        own = [health.label for health, last in self._last.items() if last.by == self._me]
        return f"<SharedPolls of {len(self._last)} upstreams, own: {own}>"

    def due_at(self, health: UpstreamHealth, every_s: float, woken_at: float) -> float:
        """When this process polls the upstream. `woken_at`: when there was a reason to poll earlier."""
        last = self._last[health]
        is_newer = last.began < woken_at
        at = max(min(last.began + every_s, woken_at if is_newer else math.inf), last.began + SHORTEST_S)
        return at if last.by == self._me or last.is_silent else at + GRACE_S

    # Own polls

    def begin(self, health: UpstreamHealth, now: float) -> None:
        self._write(health, replace(self._last[health], by=self._me, began=now))

    def end(self, health: UpstreamHealth, block: ReportedBlock | None, took_s: float, now: float) -> None:
        head, block_hash, parent_hash = block or (-1, "", "")
        last = replace(
            self._last[health],
            by=self._me,
            ended=now,
            took_s=took_s,
            is_silent=health.silent,
            head=head,
            block_hash=block_hash,
            parent_hash=parent_hash,
        )
        self._write(health, last)

    def judge(self, health: UpstreamHealth, now: float) -> None:
        """Share the upstream's standing, unless this process has not checked it yet: another process may have."""
        if health in self._last and health.standing != "unchecked":
            self._write(health, replace(self._last[health], by=self._me, standing=health.standing, judged_at=now))

    def _write(self, health: UpstreamHealth, poll: HeadPoll) -> None:
        self._last[health] = poll
        if health in self._records:
            self._records[health].write(poll)

    # Polls of others

    def news(self) -> list[tuple[UpstreamHealth, HeadPoll, HeadPoll]]:
        """The new polls of other processes: each with its upstream, and the poll that was known before."""
        if self._table is None or self._table.changes == self._seen_changes:
            return []
        self._seen_changes = self._table.changes
        news = [
            (health, self._last[health], poll)
            for health, record in self._records.items()
            if (poll := self._new(record))
        ]
        for health, last, poll in news:
            self._last[health] = poll if poll.began >= last.began else last
        return news

    def _new(self, record: PollRecord) -> HeadPoll | None:
        poll = record.news()
        return None if poll is None or poll.by == self._me else poll

    # The blocks that upstreams have

    def bounds_of(self, health: UpstreamHealth) -> str:
        """The bounds that another process has found for the upstream, as text, if they are news."""
        record = self._bounds.get(health)
        poll = None if record is None else self._new(record)
        return "" if poll is None else poll.block_hash

    def share_bounds(self, health: UpstreamHealth, now: float) -> None:
        if health in self._bounds:
            self._bounds[health].write(HeadPoll(self._me, now, now, block_hash=health.bounds.text))

    # The final block

    @property
    def anchor(self) -> tuple[int, str] | None:
        """A final block of the network, as the last process that judged its upstreams has found it: its number and hash."""
        if self._anchor_record is not None and (poll := self._anchor_record.news()):
            self._anchor = poll.head, poll.block_hash
        return self._anchor

    def set_anchor(self, number: int, block_hash: str, now: float) -> None:
        self._anchor = number, block_hash
        if self._anchor_record is not None:
            self._anchor_record.write(HeadPoll(self._me, now, now, head=number, block_hash=block_hash))
