"""Calls inside a block's transactions, which only traces show.

Tracing is slow and not every upstream supports it. A block is traced with the cheapest method that the network's upstreams
support: the whole block by geth's tracer, the whole block by Parity's (under Arbitrum's name for its oldest blocks too), or
transaction by transaction. The method that worked is
used for a while; then the better ones are tried again, because upstreams change.

The traces of a block are many megabytes. They are decoded transaction by transaction, with a pause in between.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import orjson

from proxy.chains.evm import activity
from proxy.chains.evm.matching import InternalTransfer
from proxy.chains.registry import Network
from proxy.core import upstream_errors
from proxy.errors import Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls

# How long a method is used that is not the best one.
KEEP_S = 600.0
# Bytes that are decoded in one step: less than a millisecond.
STEP_BYTES = 16_384
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_TRACER = {"tracer": "callTracer"}
# The method for blocks from before Arbitrum's Nitro upgrade, which geth's tracer cannot read.
ARBITRUM = "arbtrace_block"
TraceMethods = tuple[Callable[[int, str], Awaitable[list[InternalTransfer]]], ...]


class MalformedTrace(Exception):
    """A trace that cannot be read."""


async def _go_on() -> None:
    """No pause. Only workers need one, because they serve clients meanwhile."""


class TraceReader:
    """Reads the traces of one network. `pause` is awaited between two steps of decoding."""

    def __init__(
        self, network: Network, internal_calls: InternalCalls, *, pause: Callable[[], Awaitable[None]] = _go_on
    ) -> None:
        self._pause = pause
        self._network = network
        self._internal_calls = internal_calls
        self._best: TraceMethods = (self._by_tracer, self._by_list, self._one_by_one)
        if ARBITRUM in internal_calls.route(network).policies:
            self._best = (*self._best[:2], self._by_arbitrum, *self._best[2:])
        self._methods: TraceMethods = self._best
        self._chosen = 0.0

    def __repr__(self) -> str:
        return f"<TraceReader {self._network.id} by {self._methods[0].__name__}>"

    async def calls(self, block: int, block_hash: bytes) -> list[InternalTransfer]:
        """Trace a block with the first method that works. Raises RpcError or MalformedTrace if none does, and a Fault if no
        upstream replies."""
        if block == 0:
            # It has no transactions, and geth refuses to trace it.
            return []
        if time.monotonic() - self._chosen > KEEP_S:
            self._methods = self._best
        for index, method in enumerate(self._methods):
            try:
                calls = await method(block, "0x" + block_hash.hex())
            except RpcError as exc:
                if index + 1 < len(self._methods) and upstream_errors.classify(exc.error).kind == "unsupported":
                    continue
                raise
            except (ValueError, KeyError, TypeError, RecursionError) as exc:
                raise MalformedTrace(f"{type(exc).__name__}: {exc}") from exc
            if index:
                self._methods, self._chosen = self._methods[index:] + self._methods[:index], time.monotonic()
            return calls
        raise AssertionError  # The last method returns or raises.

    async def _by_tracer(self, _: int, block_hash: str) -> list[InternalTransfer]:
        method = "debug_traceBlockByHash"
        traces = await self._internal_calls.raw(self._network, method, block_hash, _TRACER, fresh=True)
        calls: list[InternalTransfer] = []
        async for part in self._parts(traces):
            for each in map(activity.read_traced_transaction, part):
                calls += activity.calls_of_tree(each.hash, each.call)
        return calls

    async def _by_list(self, block: int, block_hash: str, *, method: str = "trace_block") -> list[InternalTransfer]:
        raw = await self._internal_calls.raw(self._network, method, hex(block), fresh=True)
        calls: list[InternalTransfer] = []
        # The traces of one transaction are read together: a reverted call undoes those below it.
        open_: list[Any] = []
        async for items in self._parts(raw):
            part = [orjson.loads(bytes(each)) for each in items]
            if any(trace["blockHash"] != block_hash for trace in part):
                raise Unavailable("the upstream returned traces of another block")
            last = part[-1].get("transactionHash")
            open_ += part
            if any(trace.get("transactionHash") != last for trace in open_):
                calls += activity.calls_of_list([each for each in open_ if each.get("transactionHash") != last])
                open_ = [each for each in open_ if each.get("transactionHash") == last]
        return calls + activity.calls_of_list(open_)

    async def _by_arbitrum(self, block: int, block_hash: str) -> list[InternalTransfer]:
        return await self._by_list(block, block_hash, method=ARBITRUM)

    async def _one_by_one(self, _: int, block_hash: str) -> list[InternalTransfer]:
        block = await self._internal_calls.call(self._network, "eth_getBlockByHash", block_hash, False)
        if block is None:
            raise Unavailable("no upstream has the block")
        calls: list[InternalTransfer] = []
        for name in block["transactions"]:
            method = "debug_traceTransaction"
            tree = await self._internal_calls.raw(self._network, method, name, _TRACER, fresh=True)
            await self._pause()
            calls += activity.calls_of_tree(name, activity.read_traced_call(tree))
        return calls

    async def _parts(self, traces: bytes) -> AsyncIterator[list[msgspec.Raw]]:
        """The items of an array, about `STEP_BYTES` at a time."""
        await self._pause()
        items, size = list[msgspec.Raw](), 0
        for item in _items(traces):
            items.append(item)
            size += len(item)
            if size >= STEP_BYTES:
                await self._pause()
                yield items
                items, size = [], 0
        if items:
            await self._pause()
            yield items
