"""Transactions on the development chain that make real events for webhooks, one kind for each event type."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm.watch_index import KINDS
from proxy.dev import encoding

GAS = 500_000
VALUE_WEI = 10**15
# Init code that sends the coins it receives to an address: a transfer inside a transaction.
_FORWARDS = "6000600060006000" + "34" + "73{address}" + "5af100"


@dataclass(frozen=True, slots=True)
class DevChainFile:
    """The file that the running development service writes for this command."""

    upstream_url: str
    accounts: list[dict[str, Any]]
    tokens: list[dict[str, Any]]
    nfts: list[dict[str, Any]]

    @property
    def sender(self) -> str:
        return str(self.accounts[0]["address"])

    @property
    def receiver(self) -> str:
        """The address that events are about unless another is given."""
        return str(self.accounts[1]["address"])

    def contract(self, symbol: str) -> str:
        return str(next(each["address"] for each in (*self.tokens, *self.nfts) if each["symbol"] == symbol))


def _coins(_: DevChainFile, to: str) -> dict[str, str]:
    return {"to": to, "value": hex(VALUE_WEI)}


def _token(chain: DevChainFile, to: str) -> dict[str, str]:
    return {"to": chain.contract("DUSD"), "data": _data("mint(address,uint256)", to, 1_000_000)}


def _nft(chain: DevChainFile, to: str) -> dict[str, str]:
    token = secrets.randbelow(2**63)
    return {"to": chain.contract("PIC"), "data": _data("mint(address,uint256,string)", to, token, "ipfs://example")}


def _inside(_: DevChainFile, to: str) -> dict[str, str]:
    return {"data": "0x" + _FORWARDS.format(address=to.removeprefix("0x").lower()), "value": hex(VALUE_WEI)}


def _data(signature: str, *values: Any) -> str:
    return "0x" + encoding.call(signature, *values).hex()


# How to cause an event, by the kind of its type.
_BY_KIND: Mapping[str, Callable[[DevChainFile, str], dict[str, str]]] = {
    "activity": _coins,
    "mined": _coins,
    "block": _coins,
    "pending": _coins,
    "token": _token,
    "log": _token,
    "nft": _nft,
    "internal": _inside,
}
EVENT_TYPES = tuple(KINDS)


def transaction(event_type: str, chain: DevChainFile, to: str) -> dict[str, str]:
    """A transaction, from an account of the node, that makes an event of this type for `to`."""
    return {"from": chain.sender, "gas": hex(GAS), **_BY_KIND[KINDS[event_type]](chain, to)}


def matching_config(event_type: str, chain: DevChainFile, to: str, sent: str = "") -> dict[str, Any]:
    """The config of a webhook that the transaction for `to` matches. `sent`: its hash, if it is known."""
    match KINDS[event_type]:
        case "block":
            return {}
        case "mined":
            return {"tx_hashes": [sent]} if sent else {}
        case "log":
            return {"addresses": [chain.contract("DUSD")]}
        case _:
            return {"addresses": [to]}
