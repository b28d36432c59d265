"""The records of leased tokens in the host's memory, and the messages by which they are leased (leased_windows)."""

from __future__ import annotations

from typing import Final, NamedTuple

from proxy.store.shared_memory.growing_file import map_part

# The numbers of a record. The first three are all that a warm `take` needs.
READY_R: Final = 0
READY_U: Final = 1
UNTIL: Final = 2
RESERVE_R: Final = 3
RESERVE_U: Final = 4
# The tokens that were there after the last report.
BASE_R: Final = 5
BASE_U: Final = 6
# The tokens of the older slot among those.
OLD_SLOT: Final = 7
OLD_R: Final = 8
OLD_U: Final = 9
NEW_SLOT: Final = 10
NEW_UNTIL: Final = 11
DRY_UNTIL: Final = 12
ASKED_UNTIL: Final = 13
DEMAND_R: Final = 14
DEMAND_U: Final = 15
REPORTED_AT: Final = 16
# Grants to this host and to all hosts, of late.
MINE: Final = 17
MINE_AT: Final = 18
ALL: Final = 19
ANSWERED_AT: Final = 20
# The host's own buckets while Valkey is away.
EDGE_R: Final = 21
EDGE_U: Final = 22
# The edge of the request bucket in Valkey, by this host's clock.
FLEET_EDGE: Final = 23
CELLS: Final = 24
RECORD_BYTES: Final = 8 * CELLS


class LeaseReport(NamedTuple):
    """A worker's request: the tokens it needs and wants, and those that were spent or are returned since the last report.
    Tokens are whole; the rest is in seconds."""

    must_r: int
    must_u: int
    want_r: int
    want_u: int
    old_slot: int
    old_spent_r: float
    old_spent_u: float
    old_returned_r: float
    old_returned_u: float
    new_slot: int
    new_spent_r: float
    new_spent_u: float
    new_returned_r: float
    new_returned_u: float


class LeaseGrant(NamedTuple):
    """Valkey's reply. Amounts in seconds."""

    granted_r: float
    granted_u: float
    until: float
    wait_s: float
    slot: int
    # Requests granted to this host now, and to all hosts of late.
    requests: int
    all_requests: float
    # The rest in Valkey's bucket.
    there_s: float


def records_of(fd: int, start: int, slots: int) -> memoryview[float]:
    """Map the records of this many slots."""
    return memoryview(map_part(fd, start, slots * RECORD_BYTES)).cast("d")
