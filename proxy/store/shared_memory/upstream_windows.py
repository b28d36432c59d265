"""The leased limits of upstreams. An upstream is chosen first, and charged when the call is sent: these are two steps."""

from __future__ import annotations

from proxy.core.limits import TOLERANCE_S
from proxy.store.shared_memory import robust_mutexes
from proxy.store.shared_memory.host_memory import UPSTREAM_LEASES_AT, UPSTREAMS
from proxy.store.shared_memory.lease_records import CELLS, DRY_UNTIL, EDGE_R, records_of
from proxy.store.shared_memory.leased_windows import ASK, LeasedWindows
from proxy.store.shared_memory.robust_mutexes import Mutex
from proxy.store.shared_memory.windows import STRIPES

_unlock = robust_mutexes.unlock


class UpstreamWindows(LeasedWindows):
    """Guarded by the mutexes of the host's memory, which background processes have too."""

    __slots__ = ("_mutexes",)

    def __init__(self, fd: int, mutexes: list[Mutex]) -> None:
        self._mutexes = mutexes
        super().__init__(fd, fd, alone=False)

    def _map(self) -> None:
        self._locks = self._mutexes * (STRIPES // len(self._mutexes))
        self.slots = UPSTREAMS

    def _map_leases(self, slots: int) -> None:
        self._cells = records_of(self._leases_fd, UPSTREAM_LEASES_AT, UPSTREAMS)

    def look(self, slot: int, now: float, request_s: float) -> float:
        """Zero if a call can be sent, ASK if Valkey has to be asked, otherwise the seconds to wait. Takes nothing."""
        mutex = self._hold(slot)
        try:
            return self._look(slot * CELLS, now, request_s)
        finally:
            _unlock(mutex)

    def _look(self, at: int, now: float, request_s: float) -> float:
        self._expire(at, now)
        if self._held(at, 0) >= request_s - TOLERANCE_S:
            return 0.0
        if self.away:
            wait = self._share_edge(at, EDGE_R, now, request_s) - now
            return wait if wait > TOLERANCE_S else 0.0
        dry_s = self._cells[at + DRY_UNTIL] - now
        return float(dry_s) if dry_s > 0.0 else ASK

    def charge(self, slot: int, now: float, request_s: float) -> None:
        """Charge one call, also if there is no token left: the debt delays the calls after it."""
        mutex = self._hold(slot)
        try:
            if self._spend(slot, now, request_s, 0.0) == 0.0:
                return
            at = slot * CELLS
            if self.away:
                self._cells[at + EDGE_R] = self._share_edge(at, EDGE_R, now, request_s)
            else:
                self._cells[at] -= request_s
        finally:
            _unlock(mutex)
