"""Memory that all processes of a host share, besides the buckets of accounts (rate_buckets).

It is an anonymous file that the supervisor creates and every process maps: mutexes, the owners of the regions in
`AccountCounts`, the buckets of upstreams and of client addresses (`SharedBucketTable`), those regions, and last the leases
(leased_buckets), which grow with the number of accounts and keys. Far beyond those are the leases of upstreams, their polls
(poll_table), the heads of networks and the upstreams that have them, and their recent writes (write_table). The file is
sparse: only pages that are used exist.
"""

from __future__ import annotations

import mmap
import os

from proxy.store.shared_memory import account_counts, bucket_table, name_table, robust_mutexes
from proxy.store.shared_memory.account_counts import AccountCounts
from proxy.store.shared_memory.bucket_table import SharedBucketTable
from proxy.store.shared_memory.growing_file import map_part
from proxy.store.shared_memory.poll_table import PollTable
from proxy.store.shared_memory.write_table import WriteTable

# The environment variable that identifies the host, among those that share a Valkey, to its processes.
HOST = "PENSTOCK_HOST"

STRIPES = 64
# Places for 2,048 upstreams with a rate limit, and for 16,384 addresses with failed authentications.
UPSTREAM_SETS = 256
ADDRESS_SETS = 2048

_OWNERS_AT = STRIPES * robust_mutexes.STRIPE_BYTES
_UPSTREAMS_AT = _OWNERS_AT + account_counts.OWNER_BYTES
_ADDRESSES_AT = _UPSTREAMS_AT + name_table.bytes_of(UPSTREAM_SETS, bucket_table.ENTRY_BYTES)
_TABLES_END = _ADDRESSES_AT + name_table.bytes_of(ADDRESS_SETS, bucket_table.ENTRY_BYTES)
# The number of hosts, in the rest of the page.
_HOSTS_AT = _TABLES_END
# A map starts at a page.
_REGIONS_AT = -(-(_HOSTS_AT + 8) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

LEASES_AT = _REGIONS_AT + account_counts.PROCESSES * account_counts.REGION_BYTES
# Leaves room for the leases of a billion accounts and keys.
UPSTREAM_LEASES_AT = LEASES_AT + (1 << 38)
UPSTREAMS = UPSTREAM_SETS * name_table.WAYS
_POLLS_AT = UPSTREAM_LEASES_AT + (1 << 30)
_HEADS_AT = _POLLS_AT + (1 << 30)
_HOLDERS_AT = _HEADS_AT + (1 << 29)
_WRITES_AT = _HEADS_AT + (1 << 30)


def create() -> int:
    """Create the memory and return its file descriptor, which the processes inherit."""
    fd = os.memfd_create("penstock-host")
    os.ftruncate(fd, LEASES_AT)
    with mmap.mmap(fd, _OWNERS_AT) as memory:
        robust_mutexes.initialise(memory, STRIPES)
    return fd


class HostMemory:
    """One process's view of the memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = memory = mmap.mmap(fd, _REGIONS_AT)
        view = memoryview(memory)
        self.mutexes = mutexes = robust_mutexes.mutexes_of(memory, STRIPES)
        self.upstreams = SharedBucketTable(view[_UPSTREAMS_AT:_ADDRESSES_AT], mutexes)
        self.addresses = SharedBucketTable(view[_ADDRESSES_AT:_TABLES_END], mutexes)
        # How many hosts share a Valkey, as last counted by a process of this host; 0 if none has.
        self.hosts = view[_HOSTS_AT : _HOSTS_AT + 8].cast("q")
        self.counts = AccountCounts(fd, _REGIONS_AT, view[_OWNERS_AT:_UPSTREAMS_AT], mutexes)
        self.polls = PollTable(fd, _POLLS_AT)
        self.writes = WriteTable(fd, _WRITES_AT)

    def __repr__(self) -> str:
        return f"<HostMemory {self.counts!r}>"

    def heads(self, numbers: int) -> memoryview[int]:
        """This many numbers, 0 at first, for the heads of networks. A process with more networks lengthens the memory."""
        return memoryview(map_part(self.fd, _HEADS_AT, max(1, numbers) * 8)).cast("q")

    def holders(self, networks: int) -> memoryview[int]:
        """A number for each of so many networks: an upstream that has the head."""
        return memoryview(map_part(self.fd, _HOLDERS_AT, max(1, networks) * 8)).cast("q")
