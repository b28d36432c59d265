"""/simulate: what transactions would do, without sending them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.chains.evm import address as addresses
from proxy.chains.evm.asset_changes import ExecutionError, HeldAsset, SimulatedTransaction, TokenApproval, is_nft
from proxy.chains.registry import Network
from proxy.core import units
from proxy.core.holdings import Transfer
from proxy.core.transfer_history import ERC20, NAMES
from proxy.errors import InvalidRequest
from proxy.services.rpc.calls import RpcError
from proxy.services.tokens.address_history import STANDARDS
from proxy.services.tokens.simulations import Simulation, refusal_of
from proxy.turn_queue import in_turns
from proxy.web.rest.endpoint import RestHandler, RestRequest

_LARGEST = 2**256 - 1


class TransactionSimulator(Protocol):
    async def run(self, network: Network, transactions: Sequence[Mapping[str, str]], block: str) -> Simulation: ...


class SimulateHandlers:
    def __init__(self, simulations: TransactionSimulator) -> None:
        self._simulations = simulations

    def handlers(self) -> dict[str, RestHandler]:
        return {"simulate_transactions": self._simulate}

    async def _simulate(self, request: RestRequest) -> Any:
        network = request.network()
        given = [_transaction(each, f"transactions[{at}]") for at, each in enumerate(request.body["transactions"])]
        for each in given:
            if "to" in each:
                request.require_contract(network, bytes.fromhex(each["to"][2:]))
            else:
                request.require_all_contracts()
        try:
            simulation = await self._simulations.run(network, given, _block(request.body.get("block", "latest")))
        except RpcError as exc:
            raise refusal_of(exc) from None
        changes = simulation.balance_changes().items()
        return {
            "chain": request.path["chain"],
            "block_number": simulation.block,
            "transactions": [await _shown(simulation, each) for each in simulation.transactions],
            "balance_changes": await in_turns(changes, lambda each: _change(simulation, *each)),
        }


def _transaction(given: Mapping[str, Any], name: str) -> dict[str, str]:
    """The transaction as nodes take it."""
    transaction = {member: given[member] for member in ("from", "to", "data") if given.get(member) is not None}
    for member in ("from", "to"):
        if member in transaction and addresses.is_mistyped(transaction[member]):
            raise InvalidRequest(f"{name}.{member}: the checksum is wrong; check the address", param=f"{name}.{member}")
    value = int(given.get("value", "0"))
    if value > _LARGEST:
        raise InvalidRequest(f"{name}.value: must be at most 256 bits", param=f"{name}.value")
    transaction["value"] = hex(value)
    if given.get("gas") is not None:
        transaction["gas"] = hex(given["gas"])
    return transaction


def _block(text: str) -> str:
    return hex(int(text)) if text.isdigit() else text


async def _shown(simulation: Simulation, done: SimulatedTransaction) -> dict[str, Any]:
    return {
        "status": "success" if done.error is None else "failed",
        "gas_used": done.gas_used,
        "return_data": done.returned,
        "error": None if done.error is None else _error(done.error),
        "transfers": await in_turns(done.transfers, lambda each: _transfer(simulation, each)),
        "approvals": await in_turns(done.approvals, lambda each: _approval(simulation, each)),
    }


def _error(error: ExecutionError) -> dict[str, Any]:
    return {
        "message": error.text,
        "reason": error.reason or None,
        "data": "0x" + error.data.hex() if error.data else None,
    }


def _transfer(simulation: Simulation, moved: Transfer) -> dict[str, Any]:
    return {
        "from": addresses.checksum(moved.sender),
        "to": addresses.checksum(moved.recipient),
        **_asset(simulation, moved.contract, moved.standard, moved.token_id),
        "value": str(moved.amount),
        "formatted_value": _formatted(simulation, moved.contract, moved.standard, moved.amount),
    }


def _approval(simulation: Simulation, given: TokenApproval) -> dict[str, Any]:
    is_for_all, standard = given.standard is None, simulation.standard(given)
    described = simulation.asset(given.contract)
    is_token = standard == ERC20
    return {
        "owner": addresses.checksum(given.owner),
        "spender": addresses.checksum(given.spender),
        "contract": addresses.checksum(given.contract),
        "standard": None if standard is None else STANDARDS[standard],
        "token_id": None if given.token_id is None else str(given.token_id),
        "for_all": is_for_all,
        "approved": given.amount > 0,
        "value": str(given.amount) if is_token else None,
        "formatted_value": _formatted(simulation, given.contract, ERC20, given.amount) if is_token else None,
        "symbol": described.symbol,
        "decimals": described.decimals if is_token else None,
    }


def _change(simulation: Simulation, held: HeldAsset, change: int) -> dict[str, Any]:
    shown = _formatted(simulation, held.contract, held.standard, abs(change))
    return {
        "address": addresses.checksum(held.holder),
        **_asset(simulation, held.contract, held.standard, held.token_id),
        "change": str(change),
        "formatted_change": None if shown is None else f"-{shown}" if change < 0 else shown,
    }


def _asset(simulation: Simulation, contract: bytes, standard: int, token_id: int) -> dict[str, Any]:
    asset = simulation.asset(contract)
    return {
        "contract": addresses.checksum(contract) if contract else None,
        "token_id": str(token_id) if is_nft(standard) else None,
        "symbol": asset.symbol,
        "decimals": None if is_nft(standard) else asset.decimals,
        "category": NAMES[standard],
    }


def _formatted(simulation: Simulation, contract: bytes, standard: int, raw: int) -> str | None:
    decimals = simulation.asset(contract).decimals
    return None if decimals is None or is_nft(standard) else units.formatted(raw, decimals)
