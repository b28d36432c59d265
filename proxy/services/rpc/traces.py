"""Calls inside a block's transactions, which only a trace tells of.

Tracing is slow and not every upstream can do it. A block is asked for in the cheapest way that the network's upstreams know:
the whole block by geth's tracer, the whole block by Parity's, or transaction by transaction. The way that worked is kept for a
while; then the better ones are tried again, because upstreams come and go.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from proxy.chains.evm import activity
from proxy.chains.evm.matching import InternalTransfer
from proxy.chains.registry import Network
from proxy.core import dialect
from proxy.errors import Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls

# How long a way that is not the best is kept.
KEEP_S = 600.0
_TRACER = {"tracer": "callTracer"}
TraceMethods = tuple[Callable[[int, str], Awaitable[list[InternalTransfer]]], ...]


class MalformedTrace(Exception):
    """Traces that nobody can read."""


class TraceReader:
    """Of one network."""

    def __init__(self, network: Network, internal_calls: InternalCalls) -> None:
        self._network = network
        self._internal_calls = internal_calls
        self._best: TraceMethods = (self._by_tracer, self._by_list, self._one_by_one)
        self._ways: TraceMethods = self._best
        self._chosen = 0.0

    def __repr__(self) -> str:
        return f"<TraceReader {self._network.id} by {self._ways[0].__name__}>"

    async def calls(self, block: int, block_hash: bytes) -> list[InternalTransfer]:
        """By the first way that works. RpcError or Malformed where they are not to be had so, a Fault where nobody answers."""
        if time.monotonic() - self._chosen > KEEP_S:
            self._ways = self._best
        for place, way in enumerate(self._ways):
            try:
                found = await way(block, "0x" + block_hash.hex())
            except RpcError as exc:
                if place + 1 < len(self._ways) and dialect.classify(exc.error).kind == "unsupported":
                    continue
                raise
            except (ValueError, KeyError, TypeError) as exc:
                raise MalformedTrace(f"{type(exc).__name__}: {exc}") from exc
            if place:
                self._ways, self._chosen = self._ways[place:] + self._ways[:place], time.monotonic()
            return found
        raise AssertionError  # the last way returns or raises

    async def _by_tracer(self, _: int, block_hash: str) -> list[InternalTransfer]:
        traces = await self._internal_calls.call(
            self._network, "debug_traceBlockByHash", block_hash, _TRACER, fresh=True
        )
        return [call for each in traces for call in activity.calls_of_tree(each["txHash"], each["result"])]

    async def _by_list(self, block: int, block_hash: str) -> list[InternalTransfer]:
        traces = await self._internal_calls.call(self._network, "trace_block", hex(block), fresh=True)
        if any(trace["blockHash"] != block_hash for trace in traces):
            raise Unavailable("the traces are another block's")
        return activity.calls_of_list(traces)

    async def _one_by_one(self, _: int, block_hash: str) -> list[InternalTransfer]:
        block = await self._internal_calls.call(self._network, "eth_getBlockByHash", block_hash, False)
        if block is None:
            raise Unavailable("the block is not there")
        found: list[InternalTransfer] = []
        for name in block["transactions"]:
            tree = await self._internal_calls.call(self._network, "debug_traceTransaction", name, _TRACER, fresh=True)
            found += activity.calls_of_tree(name, tree)
        return found
