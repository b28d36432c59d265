"""Simulated transactions: the params of `eth_simulateV1`, and the transfers, approvals and errors in its result.

With `traceTransfers`, the node adds a log for every movement of coins: a Transfer, as tokens emit it, of an address that has no
code (`COINS`). So all changes are in the logs of a call, in their order:

    Transfer, TransferSingle, TransferBatch,    transfers, read by `facts` as on the chain
    Deposit, Withdrawal
    Approval(owner, spender, value)             three topics: ERC-20; four, with the token's id as the last: ERC-721
    ApprovalForAll(owner, operator, approved)   all tokens of the contract, ERC-721 or ERC-1155

As in `facts`, a log of another shape is not a change, and nothing raises on a contract's data. A call that reverts has no logs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from proxy.chains.evm import abi, address, facts
from proxy.chains.evm.facts import ChainLog
from proxy.chains.evm.revert_reasons import reason_of
from proxy.core import display_text
from proxy.core.holdings import Transfer
from proxy.core.transfer_history import ERC20, ERC721, ERC1155, NATIVE

METHOD = "eth_simulateV1"
# The address in the logs of coins: "0xeeee…" in the specification of eth_simulateV1.
COINS = b"\xee" * 20
APPROVAL = "0x8c5be1e5ebec7d5bd14f71427d1e84f3dd0314c0f7b2291e5b200ac8c7c3b925"
APPROVAL_FOR_ALL = "0x17307eab39ab6107e8899845ad3d59bd9653f200f220920489ca2b5937696c31"
# Transactions of one simulation.
MOST_TRANSACTIONS = 10
# Logs, and transfers, of one transaction: reading more would take the loop's time.
MOST_LOGS = 500
# Bytes of a result that is read.
MOST_RESULT = 1 << 19
_REASON_CHARACTERS = 1000
_SUCCESS = "0x1"


class TooManyChanges(ValueError):
    """The result is larger than what is read of one simulation."""


class TokenApproval(msgspec.Struct, frozen=True, gc=False):
    """An allowance. `standard`: 20 or 721; None for all tokens of a contract, because ERC-721 and ERC-1155 share that event.
    `amount`: of an ERC-20 token; for NFTs 1, or 0 if the approval was taken back."""

    standard: int | None
    contract: bytes
    owner: bytes
    spender: bytes
    amount: int
    token_id: int | None
    log_index: int


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """Why a transaction failed. `reason`: decoded from the data that it reverted with, empty without any."""

    message: str
    reason: str
    data: bytes

    @property
    def text(self) -> str:
        is_repeated = not self.reason or self.reason in self.message
        return self.message if is_repeated else f"{self.message}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SimulatedTransaction:
    """The outcome of one transaction. `logs` are those that the chain would have: without the ones of coins."""

    gas_used: int
    returned: str
    error: ExecutionError | None
    logs: list[ChainLog]
    transfers: list[Transfer]
    approvals: list[TokenApproval]


class HeldAsset(NamedTuple):
    """A token or coin of one holder. `token_id`: 0 unless it is an NFT."""

    holder: bytes
    standard: int
    contract: bytes
    token_id: int


# Requests

_FORMS = {
    "an address: 0x and 40 hex digits": re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII),
    "a number in hex of up to 256 bits, such as 0x1f": re.compile(r"0x[0-9a-fA-F]{1,64}", re.ASCII),
    "bytes in hex: 0x and two hex digits each": re.compile(r"0x(?:[0-9a-fA-F]{2})*", re.ASCII),
}
_AN_ADDRESS, _A_NUMBER, _BYTES = _FORMS
_MEMBERS = {"from": _AN_ADDRESS, "to": _AN_ADDRESS, "value": _A_NUMBER, "gas": _A_NUMBER, "chainId": _A_NUMBER}
_MEMBERS |= {"data": _BYTES, "input": _BYTES}
# Accepted and not used. Fees are not simulated: with the usual gas limit of a simulation, no sender could pay them. And the
# account's own nonce is used.
_IGNORED = frozenset({"gasPrice", "maxFeePerGas", "maxPriorityFeePerGas", "nonce", "type"})
_TAGS = frozenset({"latest", "pending", "safe", "finalized", "earliest"})


def transaction_of(given: Any, name: str) -> dict[str, str]:
    """The transaction object of a JSON-RPC call with the members that are simulated. Raises ValueError, with the member."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: must be a transaction object")
    transaction: dict[str, str] = {}
    for member, value in given.items():
        if value is None or member in _IGNORED:
            continue
        form = _MEMBERS.get(member)
        if form is None:
            raise ValueError(f"{name}.{member[:64]}: is not a member; use {', '.join(sorted(_MEMBERS))}")
        if not isinstance(value, str) or not _FORMS[form].fullmatch(value):
            raise ValueError(f"{name}.{member}: must be {form}")
        transaction[member] = value
    if "input" in transaction and transaction.setdefault("data", transaction["input"]) != transaction.pop("input"):
        raise ValueError(f"{name}.data: must equal input if both are given")
    return transaction


def block_of(given: Any, name: str) -> str:
    """A block as nodes take it: a tag, or its number in hex. Raises ValueError for all others."""
    if isinstance(given, str) and (given in _TAGS or _FORMS[_A_NUMBER].fullmatch(given)):
        return given
    raise ValueError(f"{name}: must be {', '.join(sorted(_TAGS))}, or the number of a block in hex")


def params_of(transactions: Sequence[Mapping[str, str]], block: str) -> tuple[dict[str, Any], str]:
    """The params of `eth_simulateV1`: the transactions one after the other, in the block after this one."""
    return {"blockStateCalls": [{"calls": list(transactions)}], "traceTransfers": True, "validation": False}, block


# Results


class _Failure(msgspec.Struct, gc=False):
    message: str = ""
    data: str | None = None


class CallResult(msgspec.Struct, rename="camel", gc=False):
    """One call in the result, with its logs undecoded."""

    status: str
    gas_used: str
    return_data: str = "0x"
    logs: list[msgspec.Raw] = []
    error: _Failure | None = None


class _BlockResult(msgspec.Struct, gc=False):
    number: str
    calls: list[CallResult]


_read_blocks = msgspec.json.Decoder(list[_BlockResult]).decode
_read_log = msgspec.json.Decoder(ChainLog).decode


def read_result(result: bytes, count: int) -> tuple[int, list[CallResult]]:
    """The block that the simulation is based on, and the results of `count` transactions. Raises ValueError for any other
    result, and TooManyChanges for one that is too large."""
    if len(result) > MOST_RESULT:
        raise TooManyChanges(f"its result has more than {MOST_RESULT // 1024} KiB")
    (block,) = _read_blocks(result)
    if len(block.calls) != count:
        raise ValueError(f"{len(block.calls)} results of {count} transactions")
    return int(block.number, 16) - 1, block.calls


def transaction_result(call: CallResult) -> SimulatedTransaction:
    """Raises ValueError for a result that is not one, and TooManyChanges for one with too many logs."""
    if len(call.logs) > MOST_LOGS:
        raise TooManyChanges(f"a transaction emits more than {MOST_LOGS} logs")
    logs = [_read_log(each) for each in call.logs]
    transfers, _ = facts.transfers_of(logs)
    if len(transfers) > MOST_LOGS:
        raise TooManyChanges(f"a transaction makes more than {MOST_LOGS} transfers")
    shown = "0x" + COINS.hex()
    return SimulatedTransaction(
        int(call.gas_used, 16),
        call.return_data,
        _error_of(call),
        [log for log in logs if log.address.lower() != shown],
        [_as_coins(each) if each.contract == COINS else each for each in transfers],
        approvals_of(logs),
    )


def _as_coins(moved: Transfer) -> Transfer:
    return msgspec.structs.replace(moved, standard=NATIVE, contract=b"")


def _error_of(call: CallResult) -> ExecutionError | None:
    if call.status == _SUCCESS:
        return None
    failure = call.error or _Failure()
    # Some nodes return the data of a revert as the data that the call returned.
    data = abi.unhex(failure.data) or abi.unhex(call.return_data) or b""
    message = display_text.cleaned(failure.message, _REASON_CHARACTERS) or "execution reverted"
    return ExecutionError(message, display_text.cleaned(reason_of(data), _REASON_CHARACTERS) or "", data)


def approvals_of(logs: Iterable[ChainLog]) -> list[TokenApproval]:
    """The approvals among the logs, in their order."""
    approvals = []
    for log in logs:
        try:
            approval = _approval(log)
        except ValueError:
            continue
        if approval is not None:
            approvals.append(approval)
    return approvals


def _approval(log: ChainLog) -> TokenApproval | None:
    """None for another event. Raises ValueError for another shape."""
    topics, data = log.topics, bytes.fromhex(log.data[2:])
    if not topics or topics[0] not in (APPROVAL, APPROVAL_FOR_ALL) or len(topics) not in (3, 4):
        return None
    words = [bytes.fromhex(each[2:]) for each in topics[1:]]
    owner, spender = abi.address(words[0]), abi.address(words[1])
    value = abi.uint(data) if len(topics) == 3 else abi.uint(words[2])
    if owner is None or spender is None or value is None:
        return None
    contract, index = bytes.fromhex(log.address[2:]), int(log.log_index, 16)
    if topics[0] == APPROVAL_FOR_ALL:
        is_valid = len(topics) == 3 and value in (0, 1)
        return TokenApproval(None, contract, owner, spender, value, None, index) if is_valid else None
    if len(topics) == 3:
        return TokenApproval(ERC20, contract, owner, spender, value, None, index)
    # ERC-721: "the zero address indicates there is no approved address".
    return TokenApproval(ERC721, contract, owner, spender, int(spender != address.ZERO), value, index)


def balance_changes(transfers: Iterable[Transfer]) -> dict[HeldAsset, int]:
    """The holders' gains and losses by the transfers, without those that end as they began. The zero address holds nothing."""
    sums: Counter[HeldAsset] = Counter()
    for each in transfers:
        for holder, change in ((each.sender, -each.amount), (each.recipient, each.amount)):
            if holder != address.ZERO or not each.contract:
                sums[HeldAsset(holder, each.standard, each.contract, each.token_id)] += change
    return {asset: change for asset, change in sums.items() if change}


def is_nft(standard: int) -> bool:
    return standard in (ERC721, ERC1155)
