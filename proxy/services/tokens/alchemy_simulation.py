"""The simulation methods of Alchemy's JSON-RPC API, in its forms, so that programs written for them work here.

Two differences are on purpose: a contract's code is not known, so calls and logs are not decoded; and calls in a transaction
are listed only where an upstream has `debug_traceCall`, and not those of bundles: no node traces a call on what calls before it
have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.chains.evm import asset_changes
from proxy.chains.evm.asset_changes import MOST_TRANSACTIONS, SimulatedTransaction, TokenApproval, is_nft
from proxy.chains.registry import Network
from proxy.core import jsonrpc, units
from proxy.core.holdings import Transfer
from proxy.core.transfer_history import ERC20, ERC721, ERC1155, NATIVE
from proxy.errors import InvalidRequest
from proxy.services.rpc.calls import RpcError
from proxy.services.rpc.own_methods import OwnMethod
from proxy.services.tokens.simulations import CannotSimulate, Simulation, Simulations, in_order
from proxy.turn_queue import in_turns

_ASSETS = {NATIVE: "NATIVE", ERC20: "ERC20", ERC721: "ERC721", ERC1155: "ERC1155"}
_FLAT, _NESTED = "FLAT", "NESTED"
# Deeper calls cannot be written as nested JSON (orjson: 254 levels, of which a call takes two).
MOST_NESTED = 120
_CALL_MEMBERS = ("type", "from", "to", "value", "gas", "gasUsed", "input", "output", "error", "revertReason")


@dataclass(frozen=True, slots=True, repr=False)
class AlchemySimulation:
    simulations: Simulations

    def __repr__(self) -> str:
        return f"<AlchemySimulation with {self.simulations!r}>"

    def handlers(self) -> dict[str, OwnMethod]:
        return {
            "alchemy_simulateAssetChanges": self._asset_changes,
            "alchemy_simulateAssetChangesBundle": self._bundle,
            "alchemy_simulateExecution": self._execution,
            "alchemy_simulateExecutionBundle": self._execution_bundle,
        }

    async def _asset_changes(self, network: Network, params: list[Any]) -> Any:
        if not 1 <= len(params) <= 2:
            raise InvalidRequest("params: must be a transaction, and optionally a block")
        simulation = await self._run(network, [_transaction(params[0], "params[0]")], params)
        return await _changes(simulation, simulation.transactions[0])

    async def _bundle(self, network: Network, params: list[Any]) -> Any:
        if not 1 <= len(params) <= 2 or not isinstance(params[0], list):
            raise InvalidRequest("params: must be a list of transactions, and optionally a block")
        simulation = await self._run(network, _transactions(params[0]), params)
        return [await _changes(simulation, each) for each in simulation.transactions]

    async def _execution(self, network: Network, params: list[Any]) -> Any:
        if not 1 <= len(params) <= 3:
            raise InvalidRequest("params: must be a transaction, and optionally a block and options")
        form = _format(params[2] if len(params) > 2 else None)
        asked = _transaction(params[0], "params[0]")
        simulation = await self._run(network, [asked], params)
        (done,) = simulation.transactions
        calls = await self.simulations.inner_calls(network, asked, simulation.block)
        if calls is None:
            return _executed([_outermost(asked, done)], done)
        return _executed(_nested(calls) if form == _NESTED else [_call(each) for _, each in calls], done)

    async def _execution_bundle(self, network: Network, params: list[Any]) -> Any:
        if not 1 <= len(params) <= 3 or not isinstance(params[0], list):
            raise InvalidRequest("params: must be a list of transactions, and optionally a block and options")
        _format(params[2] if len(params) > 2 else None)
        asked = _transactions(params[0])
        simulation = await self._run(network, asked, params)
        return [
            _executed([_outermost(each, done)], done) for each, done in zip(asked, simulation.transactions, strict=True)
        ]

    async def _run(self, network: Network, asked: Sequence[Mapping[str, str]], params: list[Any]) -> Simulation:
        block = "latest" if len(params) < 2 or params[1] is None else _block(params[1])
        try:
            return await self.simulations.run(network, asked, block)
        except CannotSimulate as exc:
            raise RpcError(jsonrpc.error(jsonrpc.METHOD_NOT_FOUND, exc.message)) from None


def _transaction(given: Any, name: str) -> dict[str, str]:
    try:
        return asset_changes.transaction_of(given, name)
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from None


def _transactions(given: list[Any]) -> list[dict[str, str]]:
    if not 1 <= len(given) <= MOST_TRANSACTIONS:
        raise InvalidRequest(f"params[0]: must have between 1 and {MOST_TRANSACTIONS} transactions")
    return [_transaction(each, f"params[0][{at}]") for at, each in enumerate(given)]


def _block(given: Any) -> str:
    try:
        return asset_changes.block_of(given, "params[1]")
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from None


def _format(options: Any) -> str:
    """How the calls inside of a transaction are listed."""
    if options is None:
        return _FLAT
    trace = options.get("traceOptions", {}) if isinstance(options, dict) else None
    form = trace.get("format", _FLAT) if isinstance(trace, dict) else None
    if form not in (_FLAT, _NESTED):
        raise InvalidRequest('params[2]: must be {"traceOptions": {"format": "FLAT"}}, or with "NESTED"')
    return str(form)


def _executed(calls: list[dict[str, Any]], done: SimulatedTransaction) -> dict[str, Any]:
    logs = [{"address": each.address, "data": each.data, "topics": each.topics} for each in done.logs]
    return {"calls": calls, "logs": logs}


def _nested(calls: Sequence[tuple[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The calls as a tree: each has those that it makes."""
    outermost: list[dict[str, Any]] = []
    path: list[dict[str, Any]] = []
    for depth, each in calls:
        if depth > MOST_NESTED:
            raise InvalidRequest(f"params[2]: the calls are nested more than {MOST_NESTED} deep: use the format FLAT")
        del path[depth:]
        call = _call(each)
        (path[-1].setdefault("calls", []) if path else outermost).append(call)
        path.append(call)
    return outermost


async def _changes(simulation: Simulation, done: SimulatedTransaction) -> dict[str, Any]:
    def shown(each: Transfer | TokenApproval) -> dict[str, Any]:
        return _approval(simulation, each) if isinstance(each, TokenApproval) else _transfer(simulation, each)

    return {
        "changes": await in_turns(in_order(done), shown),
        "gasUsed": hex(done.gas_used),
        "error": None if done.error is None else {"message": done.error.text},
    }


def _transfer(simulation: Simulation, moved: Transfer) -> dict[str, Any]:
    token = str(moved.token_id) if is_nft(moved.standard) else None
    return {
        "assetType": _ASSETS[moved.standard],
        "changeType": "TRANSFER",
        "from": "0x" + moved.sender.hex(),
        "to": "0x" + moved.recipient.hex(),
        **_amount(simulation, moved.contract, moved.standard, moved.amount),
        "tokenId": token,
        **_described(simulation, moved.contract),
    }


def _approval(simulation: Simulation, given: TokenApproval) -> dict[str, Any]:
    # Most contracts of this kind are ERC-721, if ERC-165 does not say.
    standard = simulation.standard(given) or ERC721
    amount = _amount(simulation, given.contract, standard, given.amount)
    if is_nft(standard) and given.amount:
        # As in Alchemy's reference: of NFTs only approvals that are taken back have an amount, which is 0.
        amount |= {"rawAmount": None, "amount": None}
    return {
        "assetType": _ASSETS[standard],
        "changeType": "APPROVE",
        "from": "0x" + given.owner.hex(),
        "to": "0x" + given.spender.hex(),
        **amount,
        "tokenId": None if given.token_id is None else str(given.token_id),
        **_described(simulation, given.contract),
    }


def _amount(simulation: Simulation, contract: bytes, standard: int, raw: int) -> dict[str, Any]:
    decimals = 0 if is_nft(standard) else simulation.asset(contract).decimals
    return {
        "rawAmount": str(raw),
        "amount": None if decimals is None else units.formatted(raw, decimals),
        "decimals": decimals,
    }


def _described(simulation: Simulation, contract: bytes) -> dict[str, Any]:
    asset = simulation.asset(contract)
    return {
        "contractAddress": "0x" + contract.hex() if contract else None,
        "symbol": asset.symbol,
        "name": asset.name,
        "logo": asset.logo,
    }


def _outermost(asked: Mapping[str, str], done: SimulatedTransaction) -> dict[str, Any]:
    """The transaction itself as a call."""
    call: dict[str, Any] = {
        "type": "CALL" if "to" in asked else "CREATE",
        "from": asked.get("from", "0x" + bytes(20).hex()),
        "value": asked.get("value", "0x0"),
        "gasUsed": hex(done.gas_used),
        "input": asked.get("data", "0x"),
        "output": done.returned,
    }
    call |= {name: asked[name] for name in ("to", "gas") if name in asked}
    if done.error is not None:
        call |= {"error": done.error.message} | ({"revertReason": done.error.reason} if done.error.reason else {})
    return _call(call)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in _CALL_MEMBERS if name in call}
