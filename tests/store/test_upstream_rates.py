"""The limit of an upstream, which all processes of a host share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.bucket_table import SharedBucketTable, SharedRate
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.store.shared_memory.name_table import WAYS


@pytest.fixture
def table() -> Iterator[SharedBucketTable]:
    memory = HostMemory(host_memory.create())
    yield memory.upstreams
    os.close(memory.fd)


def test_processes_share_one_limit(table: SharedBucketTable) -> None:
    one, other = SharedRate(table, "a", 2.0), SharedRate(table, "a", 2.0)
    assert one.admits(100.0)
    one.take(100.0)
    other.take(100.0)
    assert not one.admits(100.0)
    assert not other.admits(100.0)
    assert other.admits(100.5)


def test_bucket_of_another_upstream_in_its_place_is_not_used(table: SharedBucketTable) -> None:
    """A full set makes room for a new name where the one that was used the least was."""
    rate = SharedRate(table, "a", 1.0)
    rate.take(100.0)
    assert not rate.admits(100.0)
    others = [table.tag_of("a") + table._names.sets * number for number in range(1, WAYS + 1)]
    for tag in others:
        table.charge(tag, 200.0, 1.0)
    edges = [table.edge(tag) for tag in others]
    assert rate.admits(100.0), "its bucket is gone"
    rate.take(300.0)
    assert not rate.admits(300.0)
    assert sorted(table.edge(tag) for tag in others)[1:] == edges[1:], "one made room, and no other has changed"
