"""Balances of a wallet in the shape of QuickNode, from the index and the contracts, so that programs written for it work here.

Names and forms are those of its reference. The sums of what came in and went out are not known here, and null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from proxy.chains.evm import address
from proxy.chains.registry import Network
from proxy.errors import InvalidRequest
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.own_methods import OwnMethod
from proxy.services.tokens.evm_tokens import EvmTokens
from proxy.turn_queue import next_turn

# Tokens in a reply, by default and at most.
PER_PAGE, MOST_PER_PAGE = 40, 100
MOST_CONTRACTS = 100
# Tokens that are looked at in one turn of the loop.
PER_STEP = 500
LAST_PAGE = 1_000_000


@dataclass(frozen=True, slots=True, repr=False)
class WalletBalances:
    tokens: EvmTokens
    calls: InternalCalls

    def __repr__(self) -> str:
        return f"<WalletBalances of {self.tokens!r}>"

    def handlers(self) -> dict[str, OwnMethod]:
        return {"qn_getWalletTokenBalance": self._quicknode}

    async def _coins(self, network: Network, holder: bytes) -> int:
        return int(await self.calls.call(network, "eth_getBalance", "0x" + holder.hex(), "latest"), 16)

    async def _quicknode(self, network: Network, params: list[Any]) -> Any:
        given = _object(params, ("wallet", "contracts", "page", "perPage"))
        holder = _address(given, "wallet")
        contracts = _contracts(given.get("contracts"))
        page, size = _whole(given, "page", 1, LAST_PAGE), _whole(given, "perPage", PER_PAGE, MOST_PER_PAGE)
        found = (await self.tokens.balances(network, holder))["tokens"]
        listed = await _of_contracts(found, contracts) if contracts else found
        part = [orjson.loads(bytes(each)) for each in listed[(page - 1) * size : page * size]]
        return {
            "address": "0x" + holder.hex(),
            "ensName": None,
            "result": [_quicknode_token(each) for each in part],
            "nativeTokenBalance": str(await self._coins(network, holder)),
            "totalItems": len(listed),
            "totalPages": max(1, -(-len(listed) // size)),
            "pageNumber": page,
        }


async def _of_contracts(tokens: Sequence[msgspec.Raw], contracts: frozenset[str]) -> list[msgspec.Raw]:
    """Those tokens of a list, which may be long, that have one of the contracts."""
    found = []
    for start in range(0, len(tokens), PER_STEP):
        part = tokens[start : start + PER_STEP]
        found += [each for each in part if orjson.loads(bytes(each))["contract"].lower() in contracts]
        await next_turn()
    return found


def _quicknode_token(token: Mapping[str, Any]) -> dict[str, Any]:
    decimals = token["decimals"]
    return {
        "name": token["name"],
        "symbol": token["symbol"],
        "decimals": None if decimals is None else str(decimals),
        "address": token["contract"].lower(),
        "quantityIn": None,
        "quantityOut": None,
        "totalBalance": token["balance"],
        "total_balance": token["balance"],
    }


# Params


def _object(params: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    if len(params) != 1 or not isinstance(params[0], dict):
        raise InvalidRequest("params: must have one object")
    for each in params[0].keys() - {*names}:
        raise InvalidRequest(f"{each[:64]}: is not a member; use {', '.join(names)}")
    return params[0]


def _address(given: Mapping[str, Any], name: str) -> bytes:
    text = given.get(name)
    found = address.parse(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidRequest(f"{name}: must be an address: 0x and 40 hex digits")
    return found


def _contracts(given: Any) -> frozenset[str]:
    if given is None:
        return frozenset()
    if not isinstance(given, list) or len(given) > MOST_CONTRACTS:
        raise InvalidRequest(f"contracts: must be a list of up to {MOST_CONTRACTS} addresses")
    return frozenset("0x" + _address({"contracts": each}, "contracts").hex() for each in given)


def _whole(given: Mapping[str, Any], name: str, usual: int, most: int) -> int:
    found = given.get(name, usual)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
        raise InvalidRequest(f"{name}: must be a number between 1 and {most}")
    return found
