"""Operations that a bundler does not know: it may be another's, or one that it has forgotten.

A bundler remembers what it took itself, and that not for long. So a null is asked about elsewhere: of the network's other
bundlers, then of the chain, whose EntryPoints wrote an event about every operation that they carried out. Our own record says
where to look, and what the operation was. Nothing found, or nobody to ask: then null it is. Callers ask until there is an
answer, so what was searched once is not searched again until there are new blocks, and then those.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import msgspec
import orjson

from proxy.chains.evm import address, operations
from proxy.chains.evm.bundler_methods import RECEIPT
from proxy.chains.evm.operations import IncludedOperation
from proxy.core import jsonrpc
from proxy.errors import Fault
from proxy.services.rpc.calls import PendingReply, RpcError
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.store.operations import OperationRow, OperationStore
from proxy.tasks import Tasks
from proxy.wire.upstream import Upstream

log = logging.getLogger("penstock.bundler")

_hashes = msgspec.json.Decoder(list[str]).decode
_HASH = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)
_serial = itertools.count(1)
# Operations of which it is known how far the chain was searched for them in vain; the oldest go first.
MOST_MISSES = 10_000
# Searches of a network under way that go as far back as they may: anybody can ask for hashes that are none.
WIDE_SEARCHES = 4


class OperationLookup:
    def __init__(
        self, store: OperationStore, internal_calls: InternalCalls, tasks: Tasks, *, search_blocks: int
    ) -> None:
        self._store = store
        self._internal_calls = internal_calls
        self._tasks = tasks
        self._search_blocks = search_blocks
        # A call may have two attempts under way: the second null changes nothing.
        self._open: set[Flight] = set()
        # The head up to which an operation is not there, by network and hash.
        self._misses: dict[tuple[str, bytes], int] = {}
        self._wide: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(WIDE_SEARCHES))

    def __repr__(self) -> str:
        return f"<OperationLookup {len(self._open)} open, {len(self._misses)} searched for in vain>"

    def take(self, flight: Flight) -> bool:
        """Take over a call that was answered with null; its waiters are answered here."""
        if flight in self._open:
            return True
        name = None if flight.is_piece else _name(flight.params)
        if name is None:
            return False
        self._open.add(flight)
        self._tasks.start(f"recall {next(_serial)}", lambda: self._answer(flight, name))
        return True

    async def _answer(self, flight: Flight, name: bytes) -> None:
        """No exception leaves this: it would be asked again."""
        found = jsonrpc.NULL
        try:
            left_s = flight.began + flight.route.call_timeout_s - time.monotonic()
            async with asyncio.timeout(max(0.0, left_s)):
                found = await self._find(flight, name)
        except (Fault, RpcError, TimeoutError) as exc:
            log.info("the chain was not asked about an operation", extra={"why": type(exc).__name__})
        except Exception:
            log.exception("an operation could not be looked for")
        finally:
            self._open.discard(flight)
        if not flight.done:
            flight.land(found)

    async def _find(self, flight: Flight, name: bytes) -> bytes:
        for upstream in flight.route.upstreams:
            known = await self._ask_other(flight, upstream)
            if known != jsonrpc.NULL:
                return known
        network = flight.route.network
        record = await self._record(network.id, name)
        event = await self._event(flight, name, record)
        if event is None:
            return jsonrpc.NULL
        if flight.policy.method.name == RECEIPT:
            transaction = "0x" + event.place.transaction.hex()
            told = await self._internal_calls.call(network, "eth_getTransactionReceipt", transaction)
            return orjson.dumps(operations.receipt(event, told)) if isinstance(told, dict) else jsonrpc.NULL
        return jsonrpc.NULL if record is None else orjson.dumps(_included(event, record))

    async def _ask_other(self, flight: Flight, upstream: Upstream) -> bytes:
        """One of the bundlers that were not asked yet."""
        now = time.monotonic()
        if flight.tried >> upstream.health.index & 1 or not upstream.health.takes_calls(now):
            return jsonrpc.NULL
        flight.tried |= 1 << upstream.health.index
        pending = PendingReply()
        pending.flight = other = Flight(flight.route, flight.policy, flight.params, pending, now)
        other.is_piece = True  # Its null is ours to weigh.
        other.tried = -1  # Every bit: nobody else is asked because this one is late.
        other.send(upstream, now)
        try:
            return await pending.result()
        except (RpcError, Fault):
            return jsonrpc.NULL

    async def _record(self, network: str, name: bytes) -> OperationRow | None:
        try:
            return await self._store.read(network, name)
        except Fault:
            return None  # The chain knows what is on it without our record.

    async def _event(self, flight: Flight, name: bytes, record: OperationRow | None) -> IncludedOperation | None:
        """Where the record says it is, else among the newest blocks that were not searched yet."""
        block = None if record is None else record["block"]
        if block is not None and (event := await self._events(flight, name, block, hex(block))):
            return event
        network = flight.route.network
        head = int(await self._internal_calls.call(network, "eth_blockNumber"), 16)
        missed = self._misses.get((network.id, name))
        if missed == head:
            return None
        oldest = max(0, head - self._search_blocks + 1)
        first = max(oldest, _begin(record, missed) - network.facts.finality_blocks)
        async with nullcontext() if first > oldest else self._wide[network.id]:
            # Up to whatever is the newest by now: the number may be from a moment ago.
            event = await self._events(flight, name, first, "latest")
        if event is None:
            self._missed(network.id, name, head)
        return event

    def _missed(self, network: str, name: bytes, head: int) -> None:
        self._misses[network, name] = head
        if len(self._misses) > MOST_MISSES:
            del self._misses[next(iter(self._misses))]

    async def _events(self, flight: Flight, name: bytes, first: int, last: str) -> IncludedOperation | None:
        network = flight.route.network
        asked = {
            "address": list(network.chain.entry_points.values()),
            "topics": [operations.INCLUDED, "0x" + name.hex()],
            "fromBlock": hex(first),
            "toBlock": last,
        }
        logs = operations.read_logs(await self._internal_calls.call(network, "eth_getLogs", asked))
        events = [event for each in logs if (event := operations.included(each)) is not None and event.hash == name]
        return events[-1] if events else None


def _name(params: bytes) -> bytes | None:
    """The hash that was asked for, if it is one."""
    try:
        (text,) = _hashes(params)
    except (msgspec.DecodeError, ValueError):
        return None
    return bytes.fromhex(text[2:]) if _HASH.fullmatch(text) else None


def _begin(record: OperationRow | None, missed: int | None) -> int:
    """It is in no older block, unless that was replaced. What no bundler took from us, somebody else may have sent before."""
    is_ours = record is not None and record["status"] == "sent"
    seen = record["seen_block"] if record is not None and is_ours else None
    return max(seen or 0, missed or 0)


def _included(event: IncludedOperation, record: OperationRow) -> dict[str, Any]:
    place = event.place
    return {
        "userOperation": record["operation"],
        "entryPoint": address.checksum(place.contract),
        "blockNumber": hex(place.block),
        "blockHash": "0x" + place.block_hash.hex(),
        "transactionHash": "0x" + place.transaction.hex(),
    }
