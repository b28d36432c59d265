"""Well-behaved and hostile contracts behind a scripted upstream, with gas accounting and Multicall3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import eth_abi

from proxy.chains.evm import abi
from proxy.chains.evm.address import parse
from tests.rpc_upstreams import Refused

MULTICALL = "0xcA11bde05977b3631167028862bE2a173976CA11"
GAS = 50_000_000
CALL_GAS = 5_000


class Reverted(Exception):
    """A call that reverts with this data."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.data = data


# A contract: takes calldata, returns the result and the gas used.
Contract = Callable[[bytes], tuple[bytes, int]]


def answering(results: dict[bytes, bytes | Exception]) -> Contract:
    """A contract with these results by selector. Any other call reverts without data, as without a fallback function."""

    def act(data: bytes) -> tuple[bytes, int]:
        found = results.get(data[:4], Reverted())
        if isinstance(found, Exception):
            raise found
        return found, CALL_GAS

    return act


def burning(_: bytes) -> tuple[bytes, int]:
    """A contract that uses up all gas."""
    return b"", 1 << 62


@dataclass
class Machine:
    contracts: dict[bytes, Contract] = field(default_factory=dict)
    has_multicall: bool = True
    gas: int = GAS
    # The largest result, in bytes; larger ones are refused.
    largest: int = 1 << 30
    # The requested blocks, and the number of calls in each request.
    blocks: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def token(self, contract: bytes, balance: int, name: str = "Coin", symbol: str = "C", decimals: int = 18) -> None:
        texts = {"name()": name, "symbol()": symbol}
        numbers = {"balanceOf(address)": balance, "decimals()": decimals, "totalSupply()": 10 * balance}
        results = {abi.selector(s): bytes(eth_abi.encode(["string"], [text])) for s, text in texts.items()}
        results |= {abi.selector(s): number.to_bytes(32, "big") for s, number in numbers.items()}
        self.contracts[contract] = answering(dict(results))

    def call(self, params: list[Any]) -> str:
        """eth_call."""
        target, data = parse(params[0]["to"]), bytes.fromhex(params[0]["data"][2:])
        assert target is not None
        self.blocks.append(params[1])
        if self.has_multicall and target == parse(MULTICALL):
            return self._shown(self._aggregate(data))
        self.sizes.append(1)
        try:
            found, gas = self.contracts[target](data) if target in self.contracts else (b"", 0)
        except Reverted as exc:
            raise Refused(3, "execution reverted", data=f"0x{exc.data.hex()}") from None
        if gas > self.gas:
            raise Refused(-32000, "out of gas")
        return self._shown(found)

    def _shown(self, data: bytes) -> str:
        if len(data) > self.largest:
            raise Refused(-32000, "response size exceeded")
        return f"0x{data.hex()}"

    def _aggregate(self, data: bytes) -> bytes:
        """Like Multicall3: each call gets all but a 64th of the remaining gas (EIP-150)."""
        (calls,) = eth_abi.decode(["(address,bool,bytes)[]"], data[4:])
        self.sizes.append(len(calls))
        left, results = self.gas, []
        for target, _, calldata in calls:
            left -= 1_000
            if left < 0:
                raise Refused(-32000, "out of gas")
            given = left - left // 64
            try:
                contract = self.contracts.get(bytes.fromhex(target[2:]))
                found, gas = contract(calldata) if contract else (b"", 0)
                results.append((gas <= given, found if gas <= given else b""))
                left -= min(gas, given)
            except Reverted as exc:
                results.append((False, exc.data))
                left -= CALL_GAS
        return bytes(eth_abi.encode(["(bool,bytes)[]"], [results]))
