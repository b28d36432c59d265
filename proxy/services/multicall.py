"""Batches contract reads at one block into as few calls as possible, through Multicall3 where it is deployed.

A read that reverts is None and does not affect the others. This needs care, because the contracts are untrusted:
- A contract that burns all gas starves the calls after it, which then fail without return data. Such silent failures are
  retried one by one.
- A contract that returns megabytes makes the upstream refuse the whole reply. The calls are then halved until it is isolated.
- A network that cannot be read is an error, never an empty result: None means that the contract itself reverted.
"""

from __future__ import annotations

import asyncio
import time
from binascii import hexlify
from collections.abc import Iterator, Sequence

import orjson

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import upstream_errors
from proxy.core.heads import heard_of
from proxy.errors import Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.turn_queue import PER_TURN, next_turn

ContractCall = tuple[bytes, bytes]
# The maximum number of calls in one: 1,500 (name, symbol and decimals of 500 tokens) take 10 million gas and 0.7 MB of JSON.
MOST = 1536
# Up to this many calls that failed together are retried one by one instead of halved again.
FEW = 48
# How long a network counts as having no Multicall3 after it was not found there: it may be deployed later.
ABSENT_S = 300.0
# Errors that are not the contract's. Taking them for a revert would drop its balance from the reply.
_NOT_THE_CONTRACT: frozenset[upstream_errors.ErrorKind] = frozenset(
    {"missing_data", "unsupported", "rate_limited", "unauthorized", "server"}
)


class Multicall:
    def __init__(self, internal_calls: InternalCalls) -> None:
        self._internal_calls = internal_calls
        self._absent_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Multicall, absent on {sorted(self._absent_until)}>"

    async def tip(self, network: Network) -> int:
        """The newest block that the network is known to have."""
        if tip := self._internal_calls.route(network).heads.tip:
            return tip
        try:
            return await self._internal_calls.quantity(network, "eth_blockNumber", is_shared=True)
        except RpcError:
            raise _unreadable(network) from None

    def newest(self, network: Network) -> int:
        """The newest block of any upstream, although most may not have it yet."""
        members = self._internal_calls.route(network).state.group.members
        return max((each.head for each in heard_of(members, time.monotonic())), default=0)

    async def read(
        self, network: Network, calls: Sequence[ContractCall], *, block: int | None = None
    ) -> list[bytes | None]:
        """The result of each call (contract, calldata) at `block`, by default the newest; None if the contract reverts."""
        if not calls:
            return []
        at = hex(await self.tip(network) if block is None else block)
        if not self._is_deployed(network):
            return await self._one_by_one(network, calls, at)
        if len(calls) <= MOST:
            return await self._together(network, calls, at)
        # Not a TaskGroup: it would wrap the fault in an ExceptionGroup.
        parts = await asyncio.gather(*(self._together(network, part, at) for part in _parts(calls)))
        return [result for part in parts for result in part]

    def _is_deployed(self, network: Network) -> bool:
        return network.chain.multicall is not None and time.monotonic() >= self._absent_until.get(network.id, 0.0)

    async def _together(self, network: Network, calls: Sequence[ContractCall], at: str) -> list[bytes | None]:
        try:
            results = abi.aggregated(await self._aggregate(network, calls, at), len(calls))
        except RpcError as exc:
            if upstream_errors.classify(exc.error).kind in _NOT_THE_CONTRACT:
                raise _unreadable(network) from None
            return await self._in_halves(network, calls, at)
        if results is None:
            self._absent_until[network.id] = time.monotonic() + ABSENT_S
            return await self._one_by_one(network, calls, at)
        return await self._retry_silent(network, calls, at, results=results)

    async def _aggregate(self, network: Network, calls: Sequence[ContractCall], at: str) -> bytes | None:
        assert network.chain.multicall is not None
        target, is_large = network.chain.multicall, len(calls) > FEW
        # Large ones are hundreds of kilobytes: they are encoded in one turn and sent in another.
        if is_large:
            await next_turn()
        data = orjson.Fragment(b'"0x%b"' % hexlify(abi.aggregate(calls)))
        if is_large:
            await next_turn()
        return abi.unhex(await self._internal_calls.call(network, "eth_call", {"to": target, "data": data}, at))

    async def _in_halves(self, network: Network, calls: Sequence[ContractCall], at: str) -> list[bytes | None]:
        """After a call that was out of gas, out of time or too large: try each half."""
        if len(calls) <= FEW:
            return await self._one_by_one(network, calls, at)
        middle = len(calls) // 2
        first = await self._together(network, calls[:middle], at)
        return first + await self._together(network, calls[middle:], at)

    async def _retry_silent(
        self, network: Network, calls: Sequence[ContractCall], at: str, *, results: list[bytes | None]
    ) -> list[bytes | None]:
        """Failures without return data may be for lack of gas: retry each alone, with the full gas limit."""
        silent = [place for place, result in enumerate(results) if result is abi.SILENT]
        if silent:
            again = await self._one_by_one(network, [calls[place] for place in silent], at)
            for place, result in zip(silent, again, strict=True):
                results[place] = result
        return [result or None for result in results]

    async def _one_by_one(self, network: Network, calls: Sequence[ContractCall], at: str) -> list[bytes | None]:
        results: list[bytes | None] = []
        for start in range(0, len(calls), PER_TURN):
            separate = [
                ("eth_call", ({"to": address.checksum(target), "data": f"0x{data.hex()}"}, at))
                for target, data in calls[start : start + PER_TURN]
            ]
            replies = await self._internal_calls.call_many(network, separate)
            results += [self._result(network, reply) for reply in replies]
        return results

    def _result(self, network: Network, reply: object) -> bytes | None:
        if not isinstance(reply, RpcError):
            return abi.unhex(reply) or None
        if upstream_errors.classify(reply.error).kind in _NOT_THE_CONTRACT:
            raise _unreadable(network)
        return None


def _parts(calls: Sequence[ContractCall]) -> Iterator[Sequence[ContractCall]]:
    """Parts of about the same size: two halves are faster than a full part and a small rest."""
    count = -(-len(calls) // MOST)
    size = -(-len(calls) // count)
    for start in range(0, len(calls), size):
        yield calls[start : start + size]


def _unreadable(network: Network) -> Unavailable:
    return Unavailable(f"the network {network.id} cannot be read at the moment; try again shortly", reason="upstream")
