"""Balances of a wallet in the shapes of QuickNode and Ankr, from the index and the contracts, so that programs written for them
work here.

Names and forms are those of their references. QuickNode's sums of what came in and went out are not known here, and null.
Ankr's method reads several networks at once: the key must be allowed to use each, and pays for each. A price that is not known
is "0", as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from heapq import merge
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec
import orjson

from proxy.chains.evm import address
from proxy.chains.registry import Network, Registry
from proxy.core import units
from proxy.core.access import Key
from proxy.errors import Forbidden, InvalidRequest
from proxy.services.accounts.metering import Meter, meter_of_task
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.rpc.own_methods import OwnMethod
from proxy.services.tokens.evm_tokens import EvmTokens
from proxy.turn_queue import in_turns, next_turn

# Tokens in a reply, by default and at most.
PER_PAGE, MOST_PER_PAGE = 40, 100
MOST_CONTRACTS = 100
# Tokens that are looked at in one turn of the loop.
PER_STEP = 500
LAST_PAGE = 1_000_000
# Digits of a page token.
_LONGEST_TOKEN = 9
# Assets in a reply in Ankr's shape, by default and at most; names of networks in a call.
MOST_ASSETS, MOST_NAMES = 1000, 100
# The price of each network, which covers calls of as many units.
NETWORK_UNITS = 5


@dataclass(frozen=True, slots=True, repr=False)
class AnkrNetworks:
    """The indexed networks by Ankr's names, and by ours. `names`: Ankr's, by the ids of networks."""

    registry: Registry
    names: Mapping[str, str]
    is_indexed: Callable[[Network], bool]

    def __repr__(self) -> str:
        return f"<AnkrNetworks of {self.registry!r}>"

    def name_of(self, network: Network) -> str:
        return self.names.get(network.id, network.id)

    def all_like(self, network: Network, key: Key) -> list[Network]:
        """Those of the same class that the key may use: coins of test networks are not added to others."""
        live = network.is_live
        return [
            each
            for each in self.registry.networks()
            if each.is_live is live and self.is_indexed(each) and key.may_use(each.id, is_live=live)
        ]

    def named(self, names: Sequence[str], key: Key) -> list[Network]:
        """The networks of these names, each once."""
        by_name = {name: network for network, name in self.names.items()}
        networks = [self._named(name, by_name.get(name, name), key) for name in names]
        return [*{network.id: network for network in networks}.values()]

    def _named(self, name: str, ours: str, key: Key) -> Network:
        word, _, rest = ours.partition("/")
        network = self.registry.find(word, rest) if rest else self.registry.find_word(word, live=key.live)
        if network is None or not self.is_indexed(network):
            raise InvalidRequest(f"blockchain: {name[:64]!r} is not indexed here; GET /v1/chains lists the networks")
        if not key.may_use(network.id, is_live=network.is_live):
            raise Forbidden(f"this API key may not be used on {network.id}", reason="network")
        return network


class _Asset(NamedTuple):
    """A token, encoded as in the list of tokens, or a network's coin, which has no contract. `is_known`: it is the coin, or the
    operator's token lists or prices have it."""

    network: Network
    item: bytes
    worth: Decimal | None
    is_known: bool


class _Rating(msgspec.Struct, gc=False):
    """The members of a token by which it is sorted and kept. The others are decoded for a page only."""

    usd_value: Decimal | None
    logo_url: str | None


_read_rating = msgspec.json.Decoder(_Rating).decode


class _Wallet(NamedTuple):
    """A holder's balances on one network: the coin, if any, and its tokens in order."""

    coin: list[_Asset]
    tokens: list[_Asset]


@dataclass(frozen=True, slots=True, repr=False)
class WalletBalances:
    tokens: EvmTokens
    calls: InternalCalls
    networks: AnkrNetworks

    def __repr__(self) -> str:
        return f"<WalletBalances of {self.tokens!r}>"

    def handlers(self) -> dict[str, OwnMethod]:
        return {"qn_getWalletTokenBalance": self._quicknode, "ankr_getAccountBalance": self._ankr}

    async def _coins(self, network: Network, holder: bytes) -> int:
        return await self.calls.quantity(network, "eth_getBalance", "0x" + holder.hex(), "latest")

    # qn_getWalletTokenBalance

    async def _quicknode(self, network: Network, params: list[Any]) -> Any:
        given = _object(params, ("wallet", "contracts", "page", "perPage"))
        holder = _address(given, "wallet")
        contracts = _contracts(given.get("contracts"))
        page, size = _whole(given, "page", 1, LAST_PAGE), _whole(given, "perPage", PER_PAGE, MOST_PER_PAGE)
        tokens = (await self.tokens.balances(network, holder))["tokens"]
        listed = await _of_contracts(tokens, contracts) if contracts else tokens
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

    # ankr_getAccountBalance

    async def _ankr(self, network: Network, params: list[Any]) -> Any:
        asked, meter = _ankr_request(params), meter_of_task.get()
        assert meter is not None  # Every call of a client has one.
        known, key = self.networks, meter.key
        networks = known.all_like(network, key) if asked.names is None else known.named(asked.names, key)
        await meter.pay_for_size(NETWORK_UNITS * len(networks))
        wallets = await self._wallets(networks, asked, meter)
        coins = sorted(chain(*(each.coin for each in wallets)), key=_place)
        lists = [each.tokens for each in wallets]
        tokens = merge(*lists, key=_place)
        ordered = chain(coins, tokens) if asked.coins_first else merge(coins, tokens, key=_place)
        total, end = len(coins) + sum(map(len, lists)), asked.start + asked.size
        page = (await in_turns(islice(ordered, end), _itself))[asked.start :]
        return {
            "totalBalanceUsd": units.dollars(await _sum(chain(coins, *lists))),
            "totalCount": total,
            "assets": await self._ankr_assets(page, asked.holder),
            "nextPageToken": str(end) if end < total else "",
        }

    async def _wallets(self, networks: Sequence[Network], asked: AnkrRequest, meter: Meter) -> list[_Wallet]:
        """The wallets of a holder. They are read at the same time, as far as the account's other work leaves room."""

        async def read(network: Network) -> _Wallet:
            async with meter.pieces:
                tokens = await self._listed(network, asked.holder, only_known=asked.only_known)
                return _Wallet(await self._coin(network, asked.holder), tokens)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(each)) for each in networks]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [each.result() for each in tasks]

    async def _coin(self, network: Network, holder: bytes) -> list[_Asset]:
        raw, native = await self._coins(network, holder), network.chain.native
        if raw == 0:
            return []
        price = await self.tokens.prices.coin(network)
        worth = None if price is None else units.worth(raw, native.decimals, price)
        item = {
            "contract": "",
            "symbol": native.symbol,
            "name": network.chain.title,
            "decimals": native.decimals,
            "balance": str(raw),
            "formatted_balance": units.formatted(raw, native.decimals),
        }
        return [_Asset(network, orjson.dumps(item), worth, is_known=True)]

    async def _listed(self, network: Network, holder: bytes, *, only_known: bool) -> list[_Asset]:
        tokens, assets = (await self.tokens.balances(network, holder))["tokens"], list[_Asset]()
        for start in range(0, len(tokens), PER_STEP):
            part = [_rated(network, bytes(each)) for each in tokens[start : start + PER_STEP]]
            assets += [each for each in part if each.is_known] if only_known else part
            await next_turn()
        return assets

    async def _ankr_assets(self, assets: Sequence[_Asset], holder: bytes) -> list[dict[str, Any]]:
        """The assets of a page, with their prices."""
        contracts: dict[str, list[str]] = {each.network.id: [] for each in assets}
        items = await in_turns((each.item for each in assets), orjson.loads)
        for each, item in zip(assets, items, strict=True):
            contracts[each.network.id] += [item["contract"]] if item["contract"] else []
        prices: dict[tuple[str, str], Decimal | None] = {}
        for network in {each.network.id: each.network for each in assets}.values():
            described = await self.tokens.prices.known(network, contracts[network.id])
            prices |= {(network.id, contract): known.usd for contract, known in described.items()}
            prices[network.id, ""] = await self.tokens.prices.coin(network)

        def shown(pair: tuple[_Asset, Mapping[str, Any]]) -> dict[str, Any]:
            each, item = pair
            return {
                "blockchain": self.networks.name_of(each.network),
                "holderAddress": "0x" + holder.hex(),
                **_ankr_asset(each, item, prices[each.network.id, item["contract"]]),
            }

        return await in_turns(zip(assets, items, strict=True), shown)


def _place(asset: _Asset) -> Decimal:
    """The most valuable come first, and those without a price last."""
    return Decimal(1) if asset.worth is None else -asset.worth


def _rated(network: Network, item: bytes) -> _Asset:
    rating = _read_rating(item)
    return _Asset(network, item, rating.usd_value, rating.usd_value is not None or rating.logo_url is not None)


def _itself(asset: _Asset) -> _Asset:
    return asset


async def _sum(assets: Iterable[_Asset]) -> Decimal:
    total = Decimal(0)
    for at, each in enumerate(assets, 1):
        if each.worth is not None:
            total = units.EXACT.add(total, each.worth)
        if at % PER_STEP == 0:
            await next_turn()
    return total


def _ankr_asset(asset: _Asset, item: Mapping[str, Any], price: Decimal | None) -> dict[str, Any]:
    is_coin = not item["contract"]
    return {
        "tokenName": item["name"] or "",
        "tokenSymbol": item["symbol"] or "",
        "tokenDecimals": item["decimals"] or 0,
        "tokenType": "NATIVE" if is_coin else "ERC20",
        **({} if is_coin else {"contractAddress": item["contract"].lower()}),
        "balance": item["formatted_balance"] or item["balance"],
        "balanceRawInteger": item["balance"],
        "balanceUsd": "0" if asset.worth is None else units.dollars(asset.worth),
        "tokenPrice": "0" if price is None else units.plain(price),
        "thumbnail": item.get("logo_url") or "",
    }


async def _of_contracts(tokens: Sequence[msgspec.Raw], contracts: frozenset[str]) -> list[msgspec.Raw]:
    """Those tokens of a list, which may be long, that have one of the contracts."""
    matching = []
    for start in range(0, len(tokens), PER_STEP):
        part = tokens[start : start + PER_STEP]
        matching += [each for each in part if orjson.loads(bytes(each))["contract"].lower() in contracts]
        await next_turn()
    return matching


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


@dataclass(frozen=True, slots=True)
class AnkrRequest:
    """The validated params of `ankr_getAccountBalance`. `names`: of networks; None for all."""

    holder: bytes
    names: list[str] | None
    only_known: bool
    coins_first: bool
    start: int
    size: int


def _ankr_request(params: list[Any]) -> AnkrRequest:
    flags = ("onlyWhitelisted", "nativeFirst", "syncCheck")
    given = _object(params, ("walletAddress", "blockchain", "pageSize", "pageToken", *flags))
    only_known, coins_first, _ = (_flag(given, name) for name in flags)
    return AnkrRequest(
        _address(given, "walletAddress"),
        _names(given.get("blockchain")),
        only_known,
        coins_first,
        _start(given.get("pageToken")),
        _whole(given, "pageSize", MOST_ASSETS, MOST_ASSETS),
    )


def _flag(given: Mapping[str, Any], name: str) -> bool:
    flag = given.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise InvalidRequest(f"{name}: must be true or false")
    return bool(flag)


def _names(given: Any) -> list[str] | None:
    """Names of networks. An empty list means all of them, like none."""
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, list) or len(names) > MOST_NAMES or not all(isinstance(each, str) for each in names):
        raise InvalidRequest(f"blockchain: must be the name of a network, such as eth, or a list of up to {MOST_NAMES}")
    return names or None


def _start(token: Any) -> int:
    """The number of the first asset of a page."""
    if token in (None, ""):
        return 0
    if not isinstance(token, str) or not (token.isascii() and token.isdecimal()) or len(token) > _LONGEST_TOKEN:
        raise InvalidRequest("pageToken: must be the nextPageToken of an earlier reply")
    return int(token)


def _object(params: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    if len(params) != 1 or not isinstance(params[0], dict):
        raise InvalidRequest("params: must have one object")
    for each in params[0].keys() - {*names}:
        raise InvalidRequest(f"{each[:64]}: is not a member; use {', '.join(names)}")
    return params[0]


def _address(given: Mapping[str, Any], name: str) -> bytes:
    text = given.get(name)
    parsed = address.parse(text) if isinstance(text, str) else None
    if parsed is None:
        raise InvalidRequest(f"{name}: must be an address: 0x and 40 hex digits")
    return parsed


def _contracts(given: Any) -> frozenset[str]:
    if given is None:
        return frozenset()
    if not isinstance(given, list) or len(given) > MOST_CONTRACTS:
        raise InvalidRequest(f"contracts: must be a list of up to {MOST_CONTRACTS} addresses")
    return frozenset("0x" + _address({"contracts": each}, "contracts").hex() for each in given)


def _whole(given: Mapping[str, Any], name: str, usual: int, most: int) -> int:
    number = given.get(name)
    if number is None:
        return usual
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        raise InvalidRequest(f"{name}: must be a number between 1 and {most}")
    return number
