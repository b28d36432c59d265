"""Many reads of contracts at one block, in as few calls as it takes: through Multicall3 where it is deployed.

A read that the contract refuses is None, and the others are not harmed. That takes care, because the contracts are anybody's:
- One that burns all gas starves those behind it, which then fail without a word. Silent failures are asked again, each alone.
- One that answers with megabytes makes a reply that the upstream refuses. Then the calls are halved until those are found.
- A network that cannot be read is an error, never an empty answer: only what the contract itself refused is None.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from proxy.chains.evm import abi, address
from proxy.chains.registry import Network
from proxy.core import dialect
from proxy.errors import Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls

ContractCall = tuple[bytes, bytes]
# Calls in one: 1,500 (name, symbol and decimals of 500 tokens) take about 10 million gas and 0.7 MB of JSON.
MOST = 1536
# Below this, calls that failed together are asked one by one instead of halved again.
FEW = 48
# How long a network is taken to have no Multicall3 after it was not found there: it may be deployed tomorrow.
ABSENT_S = 300.0
# Errors that say nothing of the contract: to take them for its answer would be to lose what it holds.
_NOT_THE_CONTRACT: frozenset[dialect.ErrorKind] = frozenset(
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
            return int(await self._internal_calls.call(network, "eth_blockNumber"), 16)
        except (RpcError, TypeError, ValueError):
            raise _unreadable(network) from None

    async def read(
        self, network: Network, calls: Sequence[ContractCall], *, block: int | None = None
    ) -> list[bytes | None]:
        """What each call (contract, calldata) returns at the block, which is the newest unless it is given."""
        if not calls:
            return []
        at = hex(await self.tip(network) if block is None else block)
        if not self._is_there(network):
            return await self._one_by_one(network, calls, at)
        if len(calls) <= MOST:
            return await self._together(network, calls, at)
        # Not a TaskGroup: it would wrap the one fault that the caller is to be told.
        parts = await asyncio.gather(*(self._together(network, part, at) for part in _parts(calls)))
        return [found for part in parts for found in part]

    def _is_there(self, network: Network) -> bool:
        return network.chain.multicall is not None and time.monotonic() >= self._absent_until.get(network.id, 0.0)

    async def _together(self, network: Network, calls: Sequence[ContractCall], at: str) -> list[bytes | None]:
        try:
            found = abi.aggregated(await self._aggregate(network, calls, at), len(calls))
        except RpcError as exc:
            if dialect.classify(exc.error).kind in _NOT_THE_CONTRACT:
                raise _unreadable(network) from None
            return await self._in_halves(network, calls, at)
        if found is None:
            self._absent_until[network.id] = time.monotonic() + ABSENT_S
            return await self._one_by_one(network, calls, at)
        return await self._without_silence(network, calls, at, found=found)

    async def _aggregate(self, network: Network, calls: Sequence[ContractCall], at: str) -> bytes | None:
        assert network.chain.multicall is not None
        target = network.chain.multicall
        data = "0x" + abi.aggregate(calls).hex()
        return abi.unhex(await self._internal_calls.call(network, "eth_call", {"to": target, "data": data}, at))

    async def _in_halves(self, network: Network, calls: Sequence[ContractCall], at: str) -> list[bytes | None]:
        """Out of gas, out of time, or too large together."""
        if len(calls) <= FEW:
            return await self._one_by_one(network, calls, at)
        middle = len(calls) // 2
        one = await self._together(network, calls[:middle], at)
        return one + await self._together(network, calls[middle:], at)

    async def _without_silence(
        self, network: Network, calls: Sequence[ContractCall], at: str, *, found: list[bytes | None]
    ) -> list[bytes | None]:
        """Failures without a word may be for want of gas: each is asked again with all there is."""
        silent = [place for place, result in enumerate(found) if result is abi.SILENT]
        if silent:
            again = await self._one_by_one(network, [calls[place] for place in silent], at)
            for place, result in zip(silent, again, strict=True):
                found[place] = result
        return [result or None for result in found]

    async def _one_by_one(self, network: Network, calls: Sequence[ContractCall], at: str) -> list[bytes | None]:
        asked = [
            ("eth_call", ({"to": address.checksum(target), "data": f"0x{data.hex()}"}, at)) for target, data in calls
        ]
        answers = await self._internal_calls.call_many(network, asked)
        return [self._result(network, answer) for answer in answers]

    def _result(self, network: Network, answer: object) -> bytes | None:
        if not isinstance(answer, RpcError):
            return abi.unhex(answer) or None
        if dialect.classify(answer.error).kind in _NOT_THE_CONTRACT:
            raise _unreadable(network)
        return None


def _parts(calls: Sequence[ContractCall]) -> Iterator[Sequence[ContractCall]]:
    """Of about the same size: two halves are quicker than a whole and a rest."""
    count = -(-len(calls) // MOST)
    size = -(-len(calls) // count)
    for start in range(0, len(calls), size):
        yield calls[start : start + size]


def _unreadable(network: Network) -> Unavailable:
    return Unavailable(f"the network {network.id} cannot be read at the moment")
