"""Looking up operations for which a bundler returned null.

A bundler remembers only the operations that it accepted itself, and not for long. So a null is followed up: first at the
network's other bundlers, then on the chain, where the EntryPoints emitted an event for every operation that they executed. Our
record shows where to look and what the operation was. If nothing is found, or the chain cannot be read, the result is null.
Each further call is charged to the caller at its list price, and an account without units gets a 429. Callers poll until there
is a result, so a search that found nothing is repeated only when there are new blocks, and only over those.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import orjson

from proxy.chains.evm import address, operations
from proxy.chains.evm.bundler_methods import RECEIPT
from proxy.chains.evm.operations import IncludedOperation
from proxy.chains.registry import Network
from proxy.connection_queue import ConnectionQueue, TooManyWaiting
from proxy.core import jsonrpc
from proxy.core.lru_cache import LruCache
from proxy.errors import Fault, RateLimited
from proxy.services.accounts.metering import Meters, meter_of_task
from proxy.services.rpc.calls import RpcError, call_upstream
from proxy.services.rpc.dispatcher import Dispatcher
from proxy.services.rpc.flights import Flight
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.null_searches import NullSearches, hash_in
from proxy.store.postgres.operations import OperationRow, OperationStore
from proxy.tasks import Tasks, client_of_task
from proxy.wire.upstream import Upstream

# Operations for which a search without a result is remembered. The oldest are dropped first.
MAX_MISSES = 10_000
# Searches of one network in flight that cover the whole range, and those of one account that run or wait: clients can request
# hashes that do not exist.
WIDE_SEARCHES, MOST_OF_ACCOUNT = 4, 100


class OperationLookup:
    def __init__(
        self,
        store: OperationStore,
        internal_calls: InternalCalls,
        tasks: Tasks,
        meters: Meters,
        *,
        search_blocks: int,
    ) -> None:
        """`meters`: charge the caller for the calls that a search takes."""
        self._store = store
        self._searches = NullSearches("operation lookup", tasks, meters)
        self._internal_calls = internal_calls
        self._search_blocks = search_blocks
        # The head up to which an operation was not found, by network and hash.
        self._misses: LruCache[tuple[str, bytes], int] = LruCache(MAX_MISSES)
        self._wide: defaultdict[str, ConnectionQueue] = defaultdict(
            lambda: ConnectionQueue(WIDE_SEARCHES, per_client=MOST_OF_ACCOUNT)
        )

    def __repr__(self) -> str:
        return f"<OperationLookup {self._searches!r}, {len(self._misses)} misses>"

    def take(self, dispatcher: Dispatcher, flight: Flight) -> bool:
        """Take over a flight whose result is null, if it names an operation."""
        if flight in self._searches:
            return True
        name = None if flight.call.is_piece else hash_in(flight.params)
        if name is None:
            return False

        def deliver(result: bytes | Fault) -> None:
            if isinstance(result, Fault):
                dispatcher.complete_with_fault(flight, result)
            else:
                dispatcher.complete(flight, result)

        self._searches.start(dispatcher, flight, lambda: self._search(dispatcher, flight, name), deliver)
        return True

    async def _search(self, dispatcher: Dispatcher, flight: Flight, name: bytes) -> bytes:
        try:
            return await self._find(dispatcher, flight, name)
        except TooManyWaiting:
            message = "too many searches for operations at a time: wait for the others"
            raise RateLimited(message, retry_after_s=1) from None

    async def _find(self, dispatcher: Dispatcher, flight: Flight, name: bytes) -> bytes:
        for upstream in dispatcher.state.upstreams:
            known = await self._call_other(dispatcher, flight, upstream)
            if known != jsonrpc.NULL:
                return known
        network = dispatcher.state.network
        record = await self._record(network.id, name)
        event = await self._event(network, name, record)
        if event is None:
            return jsonrpc.NULL
        if flight.policy.method.name == RECEIPT:
            transaction = "0x" + event.position.transaction.hex()
            receipt = await self._internal_calls.call(network, "eth_getTransactionReceipt", transaction)
            return orjson.dumps(operations.receipt(event, receipt)) if isinstance(receipt, dict) else jsonrpc.NULL
        return jsonrpc.NULL if record is None else orjson.dumps(_included(event, record))

    async def _call_other(self, dispatcher: Dispatcher, flight: Flight, upstream: Upstream) -> bytes:
        """The result of another bundler; null if it was tried already or does not reply."""
        if flight.tried >> upstream.health.index & 1 or not upstream.health.takes_calls(time.monotonic()):
            return jsonrpc.NULL
        if (meter := meter_of_task.get()) is not None:
            await meter.pay(flight.policy.units)
        flight.also_tried(upstream)
        # A piece: if its result is null, it is not looked up in turn.
        pending = call_upstream(
            dispatcher, flight.policy, flight.params, upstream=upstream, is_piece=True, client=flight.client
        )
        try:
            return await pending.result()
        except (RpcError, Fault):
            return jsonrpc.NULL

    async def _record(self, network: str, name: bytes) -> OperationRow | None:
        try:
            return await self._store.read(network, name)
        except Fault:
            return None  # The chain can be searched without our record.

    async def _event(self, network: Network, name: bytes, record: OperationRow | None) -> IncludedOperation | None:
        """The operation's event: in the block that the record names, else in the newest blocks not searched yet."""
        block = None if record is None else record["block"]
        if block is not None and (event := await self._events(network, name, block, hex(block))):
            return event
        head = await self._internal_calls.quantity(network, "eth_blockNumber")
        missed = self._misses.get((network.id, name))
        if missed == head:
            return None
        oldest = max(0, head - self._search_blocks + 1)
        first = max(oldest, _begin(record, missed) - network.facts.finality_blocks)
        wide, client = self._wide[network.id], client_of_task.get()
        async with nullcontext() if first > oldest else wide.turn(client):
            # Up to the newest block, because `head` may be out of date by now.
            event = await self._events(network, name, first, "latest")
        if event is None:
            self._misses[network.id, name] = head
        return event

    async def _events(self, network: Network, name: bytes, first: int, last: str) -> IncludedOperation | None:
        query = {
            "address": list(network.chain.entry_points.values()),
            "topics": [operations.INCLUDED, "0x" + name.hex()],
            "fromBlock": hex(first),
            "toBlock": last,
        }
        logs = operations.read_logs(await self._internal_calls.call(network, "eth_getLogs", query))
        events = [event for each in logs if (event := operations.included(each)) is not None and event.hash == name]
        return events[-1] if events else None


def _begin(record: OperationRow | None, missed: int | None) -> int:
    """The first block to search: an older one contains the operation only if a block was replaced. If no bundler accepted the
    operation from us, it may have been sent in another way before."""
    is_ours = record is not None and record["status"] == "sent"
    seen = record["seen_block"] if record is not None and is_ours else None
    return max(seen or 0, missed or 0)


def _included(event: IncludedOperation, record: OperationRow) -> dict[str, Any]:
    position = event.position
    return {
        "userOperation": record["operation"],
        "entryPoint": address.checksum(position.contract),
        "blockNumber": hex(position.block),
        "blockHash": "0x" + position.block_hash.hex(),
        "transactionHash": "0x" + position.transaction.hex(),
    }
