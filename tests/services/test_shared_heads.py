"""The heads of networks in the memory that a host's workers share, for as many networks as the registry has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from proxy.chains.registry import Chain, NetworkFacts, Registry
from proxy.compose.networks import NetworkBuilder
from proxy.services.rpc.network_state import HEAD_NUMBERS, NetworkState, SharedHead
from proxy.settings import Tables, load
from proxy.store.shared_memory import host_memory
from proxy.store.shared_memory.host_memory import HostMemory
from proxy.telemetry import Tallies
from proxy.turn_queue import TurnQueue
from proxy.wire.write_buffer import WriteBuffer
from tests.shipped_tables import TABLES

MANY = 1_100


@pytest.fixture
def fd() -> Iterator[int]:
    fd = host_memory.create()
    yield fd
    os.close(fd)


def tables_of(count: int) -> Tables:
    facts = NetworkFacts(class_="live", default=True)
    chains = [Chain(name=f"c{n}", title=f"C{n}", networks={"mainnet": facts}) for n in range(count)]
    return replace(TABLES, chains=Registry(chains, TABLES.chains.families))


def states_of(memory: HostMemory | None, tables: Tables) -> dict[str, NetworkState]:
    loop = asyncio.get_running_loop()
    networks = [network.id for network in tables.chains.networks()]
    upstreams = [{"network": networks[at], "url": f"http://127.0.0.1:{2 + at}"} for at in (0, -1)]
    overrides = {
        "database": {"url": "postgresql://127.0.0.1:1/x"},
        "keys": {"pepper": "p" * 32},
        "upstreams": upstreams,
    }
    settings = load(environ={}, overrides=overrides)
    builder = NetworkBuilder(
        settings, tables, WriteBuffer(loop), TurnQueue(loop), tally=Tallies().of, heads_memory=memory
    )
    return builder.states()


@pytest.mark.parametrize("count", [1, MANY])
async def test_workers_share_the_head_of_the_last_network(fd: int, count: int) -> None:
    tables = tables_of(count)
    one, other = (states_of(HostMemory(fd), tables) for _ in range(2))
    last = [network.id for network in tables.chains.networks()][-1]
    one[last].shared_head.publish(7, 9, is_lower=True)
    head = other[last].shared_head
    assert (head.tip, head.short_hash, head.moves, head.returns) == (7, 9, 1, 1)
    if count > 1:
        assert other["c0/mainnet"].shared_head.moves == 0


async def test_worker_learns_which_upstream_has_the_head(fd: int) -> None:
    """Its own polls may find that a moment later, and the client has the block already."""
    tables = tables_of(1)
    one, other = (state for _ in range(2) for state in states_of(HostMemory(fd), tables).values())
    holder = one.group.members[1]
    for state in (one, other):
        state.heads.raise_to(6)
        for member in state.group.members:
            member.saw_head(6, 1.0)
    holder.saw_head(7, 2.0)
    one.heads.raise_to(7)
    one.forget_recent()
    other.stay_current()
    assert (other.tip, [member.head for member in other.group.members]) == (7, [6, 7])
    # The number of a holder is of no use for another tip.
    one.shared_head.publish(8)
    other.stay_current()
    assert [member.head for member in other.group.members] == [6, 7]


async def test_worker_without_shared_memory_has_its_own_heads() -> None:
    tables = tables_of(MANY)
    one, other = (states_of(None, tables) for _ in range(2))
    one[f"c{MANY - 1}/mainnet"].shared_head.publish(7)
    assert other[f"c{MANY - 1}/mainnet"].shared_head.tip == 0


def test_heads_of_different_networks_are_apart(fd: int) -> None:
    """A worker that knows more networks, after a reload, sees the numbers of the others."""
    few = HostMemory(fd).heads(3 * HEAD_NUMBERS)
    for n in range(3):
        SharedHead(few, [0] * 3, n).publish(n + 1, n + 10, is_lower=n % 2 == 1)
    many = HostMemory(fd).heads(MANY * HEAD_NUMBERS)
    heads = [SharedHead(many, [0] * MANY, n) for n in range(MANY)]
    assert [(head.tip, head.short_hash, head.moves, head.returns) for head in heads[:4]] == [
        (1, 10, 1, 0),
        (2, 11, 1, 1),
        (3, 12, 1, 0),
        (0, 0, 0, 0),
    ]
