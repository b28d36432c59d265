"""SPL tokens of both token programs. No index is needed: upstreams find token accounts by their owner.

The mint account holds the supply. Its name is in the mint itself (Token-2022) or in an account of the metadata program, whose
address is derived from the mint. Names rarely change and are cached; the supply is read each time.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from proxy.chains.registry import Network
from proxy.chains.svm import address, tokens
from proxy.core import display_text, portfolio
from proxy.core.portfolio import Balances, Holding, TokenInfo, TokenList
from proxy.errors import InvalidRequest, NotFound, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.tokens.token_contracts import KEPT_S, about_a_block
from proxy.services.tokens.token_prices import TokenPrices
from proxy.store.valkey.cache import DataCache
from proxy.turn_queue import in_turns, next_turn

# The most that upstreams accept in one getMultipleAccounts.
MOST_ACCOUNTS = 100
# Tokens that are described together: an owner may have tens of thousands.
PER_STEP = 100
# Token accounts of one program, of which about 15,000 are this large. Finding their bounds takes 5 ms.
MOST_BYTES = 6 << 20
COMMITMENT = "confirmed"
_AS_BYTES = {"encoding": "base64", "commitment": COMMITMENT}
_ACCOUNT_HEADER = {**_AS_BYTES, "dataSlice": {"offset": 0, "length": tokens.ACCOUNT_BYTES}}
_KIND = "mint"


@dataclass(frozen=True, slots=True)
class SvmTokenAccount:
    program: str
    data: bytes


class _ReadAt(msgspec.Struct):
    slot: int = 0


class _TokenAccounts(msgspec.Struct):
    """Token accounts of an owner. Each is decoded in a step: there may be tens of thousands."""

    value: list[msgspec.Raw]
    context: _ReadAt = msgspec.field(default_factory=_ReadAt)


_read_accounts = msgspec.json.Decoder(_TokenAccounts).decode


class SvmTokens:
    def __init__(self, internal_calls: InternalCalls, cache: DataCache, prices: TokenPrices) -> None:
        self._internal_calls = internal_calls
        self._cache = cache
        self._prices = prices

    def __repr__(self) -> str:
        return f"<SvmTokens of {self._internal_calls!r}>"

    async def balances(self, network: Network, owner: bytes) -> Balances:
        async def read() -> dict[str, Any]:
            return await self._read_balances(network, owner)

        name, keep_s = address.show(owner), about_a_block(network)
        balances: Balances = await self._cache.once(
            network.id, "balances", name, make=read, ttl_s=keep_s, read=portfolio.read_balances
        )
        return balances

    async def _read_balances(self, network: Network, owner: bytes) -> dict[str, Any]:
        calls = [
            ("getTokenAccountsByOwner", [address.show(owner), {"programId": program}, _ACCOUNT_HEADER])
            for program in tokens.PROGRAMS
        ]
        sums: Counter[bytes] = Counter()

        def add(raw: msgspec.Raw) -> None:
            each = orjson.loads(bytes(raw))
            account = _account(each.get("account")) if isinstance(each, dict) else None
            if account and (held := tokens.held(account.data)):
                sums[held.mint] += held.amount

        slots = []
        for result in await self._internal_calls.raw_many(network, calls):
            accounts = _token_accounts(network, result)
            slots.append(accounts.context.slot)
            await in_turns(accounts.value, add)
        held, lists = [(mint, raw) for mint, raw in sums.items() if raw], TokenList()
        for start in range(0, len(held), PER_STEP):
            lists.add(await self._described(network, dict(held[start : start + PER_STEP])))
            await next_turn()
        return {"tokens": await in_turns(lists.items(), portfolio.encoded), "as_of_block": min(slots)}

    async def _described(self, network: Network, held: Mapping[bytes, int]) -> list[Holding]:
        known = await self._known(network, [*held])
        await next_turn()
        prices = await self._prices.known(network, [token.contract for token in known.values()])
        return [
            Holding(token, held[mint], (facts := prices[token.contract]).usd, facts.logo)
            for mint, token in known.items()
        ]

    async def metadata(self, network: Network, mint: bytes) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            accounts, slot = await self._accounts(network, [mint, tokens.metadata_address(mint)])
            facts = _mint_of(accounts[0])
            if facts is None:
                raise NotFound(f"there is no mint at {address.show(mint)} on {network.id}")
            token = _token(mint, facts, accounts)
            known = (await self._prices.known(network, [token.contract]))[token.contract]
            return {**portfolio.described(token, facts.supply, known.usd, known.logo), "as_of_block": slot}

        name, keep_s = address.show(mint), about_a_block(network)
        metadata: dict[str, Any] = await self._cache.once(network.id, "metadata", name, make=read, ttl_s=keep_s)
        return metadata

    # Mints

    async def _known(self, network: Network, mints: Sequence[bytes]) -> dict[bytes, TokenInfo]:
        """The fungible tokens among the mints. A mint with a supply of one and no decimals is an NFT and is left out."""
        cached = await self._cache.get(network.id, _KIND, [address.show(mint) for mint in mints])
        by_mint = {mint: fields for mint, fields in zip(mints, cached, strict=True) if fields is not None}
        missing = [mint for mint in mints if mint not in by_mint]
        if missing:
            by_mint |= await self._read_mints(network, missing)
        return {mint: TokenInfo(**fields) for mint, fields in by_mint.items() if fields}

    async def _read_mints(self, network: Network, mints: Sequence[bytes]) -> dict[bytes, dict[str, Any]]:
        keys = [each for mint in mints for each in (mint, tokens.metadata_address(mint))]
        accounts, _ = await self._accounts(network, keys)
        by_mint: dict[bytes, dict[str, Any]] = {}
        for index, mint in enumerate(mints):
            pair = accounts[2 * index : 2 * index + 2]
            facts = _mint_of(pair[0])
            # Without the mint's decimals no amount can be shown, so an unreadable mint is left out. An NFT is cached as an
            # empty entry.
            if facts is not None:
                token = _token(mint, facts, pair)
                by_mint[mint] = {} if facts.is_nft else msgspec.to_builtins(token)
        await self._cache.put(network.id, _KIND, {address.show(mint): v for mint, v in by_mint.items()}, ttl_s=KEPT_S)
        return by_mint

    async def _accounts(self, network: Network, keys: Sequence[bytes]) -> tuple[list[SvmTokenAccount | None], int]:
        """The accounts in the order of `keys`, and the slot at which they were read."""
        names = [address.show(each) for each in keys]
        parts = [names[start : start + MOST_ACCOUNTS] for start in range(0, len(names), MOST_ACCOUNTS)]
        results = await self._call_many(network, [("getMultipleAccounts", [part, _AS_BYTES]) for part in parts])
        accounts = [_account(each) for result in results for each in _list(result["value"])]
        if len(accounts) != len(keys):
            raise _unreadable(network)
        return accounts, min(_slot(result) for result in results)

    async def _call_many(self, network: Network, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        """The results, each with `context` and `value`. Raises Unavailable if any call fails."""
        results = await self._internal_calls.call_many(network, calls)
        for result in results:
            if isinstance(result, RpcError) or not isinstance(result, dict) or "value" not in result:
                raise _unreadable(network)
        return results


def _token_accounts(network: Network, result: bytes | RpcError) -> _TokenAccounts:
    if isinstance(result, RpcError):
        raise _unreadable(network)
    if len(result) > MOST_BYTES:
        raise InvalidRequest("parameter 'address': has too many token accounts to list", param="address")
    try:
        return _read_accounts(result)
    except msgspec.DecodeError:
        raise _unreadable(network) from None


def _mint_of(account: SvmTokenAccount | None) -> tokens.Mint | None:
    return tokens.mint(account.data) if account is not None and account.program in tokens.PROGRAMS else None


def _token(mint: bytes, facts: tokens.Mint, accounts: Sequence[SvmTokenAccount | None]) -> TokenInfo:
    """The name in the mint takes precedence over the metadata program's."""
    own, other = accounts
    named = tokens.own_naming(own.data) if own is not None and own.program == tokens.TOKEN_2022 else None
    if named is None and other is not None and other.program == tokens.METADATA_PROGRAM:
        named = tokens.naming(other.data, mint)
    named = named or tokens.MintName()
    return TokenInfo(
        address.show(mint),
        display_text.cleaned(named.name, display_text.NAME),
        display_text.cleaned(named.symbol, display_text.SYMBOL),
        facts.decimals,
    )


def _account(given: Any) -> SvmTokenAccount | None:
    try:
        return SvmTokenAccount(str(given["owner"]), base64.b64decode(given["data"][0], validate=True))
    except (TypeError, KeyError, IndexError, binascii.Error, ValueError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _slot(result: dict[str, Any]) -> int:
    context = result.get("context")
    slot = context.get("slot") if isinstance(context, dict) else None
    return slot if isinstance(slot, int) else 0


def _unreadable(network: Network) -> Unavailable:
    return Unavailable(f"the network {network.id} cannot be read at the moment; try again shortly")
