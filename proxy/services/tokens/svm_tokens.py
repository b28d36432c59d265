"""SPL tokens of both token programs: no index is needed, because accounts are found by their owner.

The mint says how much there is; its name is in the mint itself (Token-2022) or with the metadata program, at an address that
follows from the mint. What a mint is called seldom changes and is remembered; how much there is, is asked each time.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.chains.registry import Network
from proxy.chains.svm import address, tokens
from proxy.core import display_text, portfolio
from proxy.core.portfolio import Balances, Holding, TokenInfo
from proxy.errors import NotFound, Unavailable
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.tokens.contracts import KEPT_S, about_a_block
from proxy.services.tokens.token_prices import TokenPrices
from proxy.store.cache import DataCache

# What upstreams take in one getMultipleAccounts.
MOST_ACCOUNTS = 100
COMMITMENT = "confirmed"
_AS_BYTES = {"encoding": "base64", "commitment": COMMITMENT}
_BEGINNING = {**_AS_BYTES, "dataSlice": {"offset": 0, "length": tokens.ACCOUNT_BYTES}}
_KIND = "mint"


@dataclass(frozen=True, slots=True)
class SvmTokenAccount:
    program: str
    data: bytes


class SvmTokens:
    def __init__(self, internal_calls: InternalCalls, kept: DataCache, market: TokenPrices) -> None:
        self._internal_calls = internal_calls
        self._kept = kept
        self._market = market

    def __repr__(self) -> str:
        return f"<SvmTokens of {self._internal_calls!r}>"

    async def balances(self, network: Network, owner: bytes) -> Balances:
        async def read() -> dict[str, Any]:
            return await self._read_balances(network, owner)

        name, keep_s = address.show(owner), about_a_block(network)
        found: Balances = await self._kept.once(
            network.id, "balances", name, make=read, ttl_s=keep_s, read=portfolio.read_balances
        )
        return found

    async def _read_balances(self, network: Network, owner: bytes) -> dict[str, Any]:
        calls = [
            ("getTokenAccountsByOwner", [address.show(owner), {"programId": program}, _BEGINNING])
            for program in tokens.PROGRAMS
        ]
        answers = await self._ask(network, calls)
        sums: Counter[bytes] = Counter()
        for answer in answers:
            for each in _list(answer["value"]):
                account = _account(each.get("account")) if isinstance(each, dict) else None
                if account and (held := tokens.held(account.data)):
                    sums[held.mint] += held.amount
        items = await self._listed(network, {mint: raw for mint, raw in sums.items() if raw})
        return {"tokens": items, "as_of_block": min(_slot(answer) for answer in answers)}

    async def _listed(self, network: Network, held: Mapping[bytes, int]) -> list[dict[str, Any]]:
        known = await self._known(network, [*held])
        market = await self._market.known(network, [token.contract for token in known.values()])
        return portfolio.listed(
            Holding(token, held[mint], (told := market[token.contract]).usd, told.logo) for mint, token in known.items()
        )

    async def metadata(self, network: Network, mint: bytes) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            accounts, slot = await self._accounts(network, [mint, tokens.metadata_address(mint)])
            told = _minted(accounts[0])
            if told is None:
                raise NotFound(f"there is no mint at {address.show(mint)} on {network.id}")
            token = _token(mint, told, accounts)
            known = (await self._market.known(network, [token.contract]))[token.contract]
            return {**portfolio.described(token, told.supply, known.usd, known.logo), "as_of_block": slot}

        name, keep_s = address.show(mint), about_a_block(network)
        found: dict[str, Any] = await self._kept.once(network.id, "metadata", name, make=read, ttl_s=keep_s)
        return found

    # Mints

    async def _known(self, network: Network, mints: Sequence[bytes]) -> dict[bytes, TokenInfo]:
        """The tokens among the mints: one that there is but one of, and whole, is an NFT and not a balance."""
        kept = await self._kept.get(network.id, _KIND, [address.show(mint) for mint in mints])
        found = {mint: told for mint, told in zip(mints, kept, strict=True) if told is not None}
        missing = [mint for mint in mints if mint not in found]
        if missing:
            found |= await self._read_mints(network, missing)
        return {mint: TokenInfo(**told) for mint, told in found.items() if told}

    async def _read_mints(self, network: Network, mints: Sequence[bytes]) -> dict[bytes, dict[str, Any]]:
        asked = [each for mint in mints for each in (mint, tokens.metadata_address(mint))]
        accounts, _ = await self._accounts(network, asked)
        found: dict[bytes, dict[str, Any]] = {}
        for place, mint in enumerate(mints):
            pair = accounts[2 * place : 2 * place + 2]
            told = _minted(pair[0])
            # A mint that cannot be read has no amount that could be shown either; an NFT is known by an empty entry.
            if told is not None:
                token = _token(mint, told, pair)
                found[mint] = {} if told.is_nft else msgspec.to_builtins(token)
        await self._kept.put(network.id, _KIND, {address.show(mint): v for mint, v in found.items()}, ttl_s=KEPT_S)
        return found

    async def _accounts(self, network: Network, asked: Sequence[bytes]) -> tuple[list[SvmTokenAccount | None], int]:
        """The accounts in order, and the slot that they were read at."""
        names = [address.show(each) for each in asked]
        parts = [names[start : start + MOST_ACCOUNTS] for start in range(0, len(names), MOST_ACCOUNTS)]
        answers = await self._ask(network, [("getMultipleAccounts", [part, _AS_BYTES]) for part in parts])
        accounts = [_account(each) for answer in answers for each in _list(answer["value"])]
        if len(accounts) != len(asked):
            raise _unreadable(network)
        return accounts, min(_slot(answer) for answer in answers)

    async def _ask(self, network: Network, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        """Answers with their contexts; a network that gives none cannot be read."""
        answers = await self._internal_calls.call_many(network, calls)
        for answer in answers:
            if isinstance(answer, RpcError) or not isinstance(answer, dict) or "value" not in answer:
                raise _unreadable(network)
        return answers


def _minted(account: SvmTokenAccount | None) -> tokens.Mint | None:
    return tokens.mint(account.data) if account is not None and account.program in tokens.PROGRAMS else None


def _token(mint: bytes, told: tokens.Mint, accounts: Sequence[SvmTokenAccount | None]) -> TokenInfo:
    """The mint's own name before the metadata program's."""
    own, other = accounts
    named = tokens.own_naming(own.data) if own is not None and own.program == tokens.TOKEN_2022 else None
    if named is None and other is not None and other.program == tokens.METADATA_PROGRAM:
        named = tokens.naming(other.data, mint)
    named = named or tokens.MintName()
    return TokenInfo(
        address.show(mint),
        display_text.cleaned(named.name, display_text.NAME),
        display_text.cleaned(named.symbol, display_text.SYMBOL),
        told.decimals,
    )


def _account(given: Any) -> SvmTokenAccount | None:
    try:
        return SvmTokenAccount(str(given["owner"]), base64.b64decode(given["data"][0], validate=True))
    except (TypeError, KeyError, IndexError, binascii.Error, ValueError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _slot(answer: dict[str, Any]) -> int:
    context = answer.get("context")
    slot = context.get("slot") if isinstance(context, dict) else None
    return slot if isinstance(slot, int) else 0


def _unreadable(network: Network) -> Unavailable:
    return Unavailable(f"the network {network.id} cannot be read at the moment")
