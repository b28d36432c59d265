"""Events of user operations and wallets: those of an EntryPoint, and of a SimpleAccount when it is deployed.

A log that does not match its topic is not an event: the result is None, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sha3

from proxy.chains.evm import abi, address
from proxy.chains.evm.facts import ChainLog


def topic(signature: str) -> str:
    return f"0x{sha3.keccak_256(signature.encode()).hexdigest()}"


INCLUDED = topic("UserOperationEvent(bytes32,address,address,uint256,bool,uint256,uint256)")
REVERTED = topic("UserOperationRevertReason(bytes32,address,uint256,bytes)")
BEFORE_EXECUTION = topic("BeforeExecution()")
# Emitted by the account itself, not by the caller of the factory.
INITIALIZED = topic("SimpleAccountInitialized(address,address)")


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position and contract of a log."""

    contract: bytes
    block: int
    block_hash: bytes
    transaction: bytes
    log_index: int


@dataclass(frozen=True, slots=True)
class IncludedOperation:
    """An operation that is on the chain, whether or not its call succeeded. `position.contract` is its EntryPoint."""

    hash: bytes
    sender: bytes
    paymaster: bytes | None
    nonce: int
    success: bool
    cost_wei: int
    gas_used: int
    position: LogPosition


def included(log: ChainLog) -> IncludedOperation | None:
    """The event that this log is, if it is one."""
    # Runs for every log of a chain: most end here.
    if len(log.topics) != 4 or log.topics[0] != INCLUDED:
        return None
    data = abi.unhex(log.data)
    if data is None or len(data) != 4 * abi.WORD:
        return None
    position = _position(log)
    name, *parties = (abi.unhex(each) for each in log.topics[1:])
    sender, paymaster = (abi.address(each) for each in parties)
    if position is None or name is None or len(name) != abi.WORD or sender is None or paymaster is None:
        return None
    return IncludedOperation(
        hash=name,
        sender=sender,
        paymaster=paymaster if any(paymaster) else None,
        nonce=int.from_bytes(data[:32], "big"),
        success=any(data[32:64]),
        cost_wei=int.from_bytes(data[64:96], "big"),
        gas_used=int.from_bytes(data[96:], "big"),
        position=position,
    )


def born(log: ChainLog) -> LogPosition | None:
    """The position of a wallet's deployment, if this log reports one. Its contract is the wallet."""
    return _position(log) if len(log.topics) == 3 and log.topics[0] == INITIALIZED else None


def _position(log: ChainLog) -> LogPosition | None:
    contract = abi.unhex(log.address)
    if contract is None:
        return None
    block_hash, transaction = bytes.fromhex(log.block_hash[2:]), bytes.fromhex(log.transaction_hash[2:])
    return LogPosition(contract, int(log.block_number, 16), block_hash, transaction, int(log.log_index, 16))


def read_logs(logs: object) -> list[ChainLog]:
    """Logs as an upstream returned them, decoded; empty if they are not valid."""
    try:
        return msgspec.convert(logs, list[ChainLog])
    except msgspec.ValidationError:
        return []


def logs_of(event: IncludedOperation, logs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The logs that an operation emitted: those between the previous operation's event and its own.

    Operations are executed one after the other, each with its event at the end; the first begins after BeforeExecution.
    """
    emitted: list[Mapping[str, Any]] = []
    for log in logs:
        name = (log.get("topics") or [None])[0]
        if name == INCLUDED and log.get("logIndex") == hex(event.position.log_index):
            return emitted
        if name in (BEFORE_EXECUTION, INCLUDED):
            emitted = []
        else:
            emitted.append(log)
    return emitted


def revert_reason(event: IncludedOperation, logs: Iterable[Mapping[str, Any]]) -> str | None:
    """The revert data of a failed call, if the EntryPoint reported it."""
    for log in logs:
        topics = log.get("topics") or []
        if len(topics) == 3 and topics[0] == REVERTED and topics[1] == "0x" + event.hash.hex():
            reason = abi.dynamic(abi.unhex(log.get("data")), 1)
            return None if reason is None else "0x" + reason.hex()
    return None


def receipt(event: IncludedOperation, transaction: Mapping[str, Any]) -> dict[str, Any]:
    """A UserOperationReceipt from the event and its transaction's receipt."""
    logs = transaction.get("logs") or []
    own = logs_of(event, logs)
    answer: dict[str, Any] = {
        "userOpHash": "0x" + event.hash.hex(),
        "entryPoint": address.checksum(event.position.contract),
        "sender": address.checksum(event.sender),
        "nonce": hex(event.nonce),
        "actualGasUsed": hex(event.gas_used),
        "actualGasCost": hex(event.cost_wei),
        "success": event.success,
        "logs": own,
        "receipt": transaction,
    }
    if event.paymaster is not None:
        answer["paymaster"] = address.checksum(event.paymaster)
    if not event.success and (reason := revert_reason(event, own)) is not None:
        answer["reason"] = reason
    return answer
