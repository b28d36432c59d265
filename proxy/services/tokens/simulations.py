"""Simulates transactions on the state of a block, without sending them: what they move, approve and cost, or why they fail.

Nodes run the transactions (`eth_simulateV1`), one after the other, each on what those before it have done. Their logs show the
changes; contracts describe the tokens. No fees are charged, signatures and nonces are not checked. All calls are paid for at
their list price, the transactions of one simulation as a call each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.chains.evm import asset_changes, nfts
from proxy.chains.evm.asset_changes import (
    METHOD,
    HeldAsset,
    SimulatedTransaction,
    TokenApproval,
    TooManyChanges,
    is_nft,
)
from proxy.chains.evm.revert_reasons import message_of
from proxy.chains.families import family_of
from proxy.chains.registry import Network
from proxy.core import upstream_errors
from proxy.core.holdings import Transfer
from proxy.core.portfolio import TokenInfo
from proxy.errors import Fault, InvalidRequest, NotFound, Unavailable
from proxy.services.multicall import Multicall
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.internal_calls import InternalCalls
from proxy.services.tokens.token_contracts import TokenContracts
from proxy.services.tokens.token_prices import TokenPrices
from proxy.tasks import min_block_of_task
from proxy.turn_queue import next_turn

_TRACE = "debug_traceCall"
# Contracts whose names are read for one simulation. Others are described as unknown.
MOST_CONTRACTS = 200
# Calls inside a transaction that are listed.
MOST_CALLS = 1000
# Errors that are about the transactions. All others are about the upstreams.
_OF_THE_CALLER: frozenset[upstream_errors.ErrorKind] = frozenset(
    {"revert", "invalid", "nonce_too_low", "underpriced", "rejected", "unknown"}
)
_COIN = b""


class CannotSimulate(NotFound):
    """The network's upstreams do not have the method."""


@dataclass(frozen=True, slots=True)
class KnownAsset:
    """A token or coin as its contract or its chain describes it; None for what is unknown."""

    name: str | None
    symbol: str | None
    decimals: int | None
    logo: str | None = None


_UNKNOWN = KnownAsset(None, None, None)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Transactions on the state of `block`. `approved`: the standards of contracts all of whose tokens were approved; None if
    unknown."""

    block: int
    transactions: list[SimulatedTransaction]
    assets: Mapping[bytes, KnownAsset]
    approved: Mapping[bytes, int | None]

    def asset(self, contract: bytes) -> KnownAsset:
        """The coin, if there is no contract."""
        return self.assets.get(contract, _UNKNOWN)

    def standard(self, approval: TokenApproval) -> int | None:
        return self.approved.get(approval.contract) if approval.standard is None else approval.standard

    def balance_changes(self) -> dict[HeldAsset, int]:
        return asset_changes.balance_changes(moved for each in self.transactions for moved in each.transfers)


@dataclass(frozen=True, slots=True, repr=False)
class Simulations:
    contracts: TokenContracts
    multicall: Multicall
    prices: TokenPrices
    calls: InternalCalls

    def __repr__(self) -> str:
        return f"<Simulations by {self.calls!r}>"

    async def run(self, network: Network, transactions: Sequence[Mapping[str, str]], block: str) -> Simulation:
        """`block`: a tag, or a number in hex. Raises RpcError if the upstreams refuse the transactions, and a Fault if they
        cannot be simulated."""
        if family_of(network).tokens != "evm":
            raise CannotSimulate(f"transactions of {network.id} cannot be simulated", reason="network")
        based_on, simulated = await self._simulate(network, transactions, await self._pinned(network, block))
        # Descriptions are kept for all clients, so they are never read at an old block, where a contract may be missing.
        tip = await self.multicall.tip(network)
        assets = await self._assets(network, simulated, tip)
        return Simulation(based_on, simulated, assets, await self._approved(network, simulated, tip))

    async def _pinned(self, network: Network, block: str) -> str:
        """The newest block by its number, so that all calls are about the same."""
        if block != "latest":
            return block
        tip = await self.multicall.tip(network)
        # Most upstreams may not have the block of X-Min-Block: one that has it is enough.
        return hex(tip if tip >= min_block_of_task.get() else max(tip, self.multicall.newest(network)))

    async def _simulate(
        self, network: Network, transactions: Sequence[Mapping[str, str]], block: str
    ) -> tuple[int, list[SimulatedTransaction]]:
        try:
            asked = asset_changes.params_of(transactions, block)
            raw = await self.calls.raw(network, METHOD, *asked, pieces=len(transactions))
        except RpcError as exc:
            if is_unsupported(exc):
                raise CannotSimulate(
                    f"transactions of {network.id} cannot be simulated: none of its upstreams has {METHOD}",
                    reason="network",
                ) from None
            raise
        simulated = []
        try:
            based_on, results = asset_changes.read_result(raw, len(transactions))
            for each in results:
                # One turn of the loop for each: it may have hundreds of logs.
                await next_turn()
                simulated.append(asset_changes.transaction_result(each))
        except TooManyChanges as exc:
            raise InvalidRequest(f"the simulation is too large: {exc}") from None
        except (ValueError, TypeError) as exc:
            raise Unavailable("the upstream's result of the simulation cannot be read", reason="upstream") from exc
        return based_on, simulated

    async def _assets(
        self, network: Network, simulated: Sequence[SimulatedTransaction], block: int
    ) -> dict[bytes, KnownAsset]:
        coin = network.chain.native
        assets = {_COIN: KnownAsset(None, coin.symbol, coin.decimals)}
        contracts = _contracts(simulated)[:MOST_CONTRACTS]
        if contracts:
            tokens = await self.contracts.known(network, contracts, block)
            logos = self.prices.logos(network, [each.contract for each in tokens.values()])
            assets |= {contract: _described(token, logos) for contract, token in tokens.items()}
        return assets

    async def _approved(
        self, network: Network, simulated: Sequence[SimulatedTransaction], block: int
    ) -> dict[bytes, int | None]:
        """The standards of contracts all of whose tokens were approved: their event does not say which one."""
        moved = {each.contract: each.standard for done in simulated for each in done.transfers if is_nft(each.standard)}
        unclear = sorted({each.contract for done in simulated for each in done.approvals if each.standard is None})
        standards: dict[bytes, int | None] = {contract: moved.get(contract) for contract in unclear}
        asked = [contract for contract in unclear if standards[contract] is None][:MOST_CONTRACTS]
        questions = [(contract, data) for contract in asked for data in nfts.INTERFACES]
        replies = await self.multicall.read(network, questions, block=block)
        size = len(nfts.INTERFACES)
        for at, contract in enumerate(asked):
            standards[contract] = nfts.by_erc165(replies[size * at : size * (at + 1)])
        return standards

    async def inner_calls(
        self, network: Network, transaction: Mapping[str, str], block: int
    ) -> list[tuple[int, dict[str, Any]]] | None:
        """A transaction's calls in the order in which they begin, each with its depth, the outermost first; None if no upstream
        traces."""
        try:
            raw = await self.calls.raw(network, _TRACE, transaction, hex(block), {"tracer": "callTracer"})
        except RpcError as exc:
            if is_unsupported(exc):
                return None
            raise
        if len(raw) > asset_changes.MOST_RESULT:
            raise InvalidRequest(f"the trace is too large: it has more than {asset_changes.MOST_RESULT // 1024} KiB")
        await next_turn()
        calls, open_ = list[tuple[int, dict[str, Any]]](), [(0, orjson.loads(raw))]
        while open_:
            depth, call = open_.pop()
            if not isinstance(call, dict) or len(calls) == MOST_CALLS:
                raise InvalidRequest(f"the trace is too large: it has more than {MOST_CALLS} calls")
            open_ += [(depth + 1, each) for each in reversed(call.pop("calls", None) or ())]
            calls.append((depth, call))
        return calls


def is_unsupported(exc: RpcError) -> bool:
    return upstream_errors.classify(exc.error).kind == "unsupported"


def refusal_of(exc: RpcError) -> Fault:
    """The fault for transactions that nodes refuse to run, such as those of a sender without the coins."""
    if upstream_errors.classify(exc.error).kind in _OF_THE_CALLER:
        said = message_of(exc.error.decode("utf-8", "replace"))
        return InvalidRequest(f"the transactions cannot be run: {said}", reason="state")
    return Unavailable("no upstream can simulate the transactions at the moment; try again shortly", reason="upstream")


def in_order(done: SimulatedTransaction) -> list[Transfer | TokenApproval]:
    """The changes in the order of their logs."""
    changes: list[Transfer | TokenApproval] = [*done.transfers, *done.approvals]
    return sorted(changes, key=lambda each: each.log_index)


def _contracts(simulated: Sequence[SimulatedTransaction]) -> list[bytes]:
    """All contracts with changes, each once, the first ones first."""
    changed = (each.contract for done in simulated for each in in_order(done))
    return [contract for contract in dict.fromkeys(changed) if contract]


def _described(token: TokenInfo, logos: Mapping[str, str]) -> KnownAsset:
    return KnownAsset(token.name, token.symbol, token.decimals, logos.get(token.contract))
