"""A block's transactions and the calls inside them, in the form that matching uses.

Two trace formats are read: geth's `callTracer`, a tree for each transaction, and Parity's `trace_block`, a list with
paths. Both are reduced to coin transfers that appear in no transaction and no log: calls, creations and
self-destructions below the transaction itself, with a value, that were not reverted. DELEGATECALL and CALLCODE run
foreign code in the caller's name and move nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec

from proxy.chains.evm.facts import Header
from proxy.chains.evm.matching import InternalTransfer, MatchTransaction
from proxy.core.holdings import Transfer
from proxy.core.transfer_history import FAILED, INTERNAL, NATIVE

_MOVES = frozenset({"call", "create", "create2", "selfdestruct", "suicide"})
_fromhex = bytes.fromhex
# The longest value: 0x and 64 digits.
_WORD = 66


class _Transaction(msgspec.Struct, rename={"sender": "from", "index": "transactionIndex"}, gc=False):
    hash: str
    sender: str
    value: str
    nonce: str
    index: str | None = None
    to: str | None = None
    input: str = "0x"


_read_all = msgspec.json.Decoder(list[_Transaction]).decode
_read_one = msgspec.json.Decoder(_Transaction).decode


def is_whole(header: Header) -> bool:
    """Whether a block contains its transactions and not only their hashes."""
    start = bytes(header.transactions).lstrip()[1:].lstrip()
    return start[:1] in (b"{", b"]")


def transactions_of(header: Header) -> list[MatchTransaction]:
    """Raises ValueError if they are not valid."""
    return [_tx(each) for each in _read_all(header.transactions)]


def read_transactions(given: list[Any]) -> list[MatchTransaction]:
    """From transactions that are decoded already. ValueError if they are not valid."""
    return [_tx(each) for each in msgspec.convert(given, list[_Transaction])]


def decoded_transactions(given: Iterable[msgspec.Raw]) -> list[MatchTransaction]:
    """From the JSON of each. Raises ValueError if they are not valid."""
    return [_tx(_read_one(each)) for each in given]


def native_transfers(header: Header, failed: Container[str]) -> list[Transfer]:
    """The coins that a block's transactions move, including failed ones. Raises ValueError if they are not valid."""
    block = int(header.number, 16)
    return [
        Transfer(
            NATIVE,
            b"",
            each.sender,
            each.recipient or b"",
            each.value,
            0,
            each.hash,
            index,
            FAILED if each.hash in failed else 0,
            block,
        )
        for index, each in enumerate(transactions_of(header))
        if each.value
    ]


def internal_transfers(calls: Iterable[InternalTransfer], block: int) -> list[Transfer]:
    """The same of the calls inside a block's transactions."""
    counts: dict[str, int] = {}
    places: dict[str, int] = {}
    transfers = []
    for each in calls:
        index = places.setdefault(each.transaction, len(places))
        item = counts[each.transaction] = counts.get(each.transaction, -1) + 1
        transfers.append(
            Transfer(INTERNAL, b"", each.sender, each.recipient, each.value, 0, each.transaction, index, item, block)
        )
    return transfers


def _tx(transaction: _Transaction) -> MatchTransaction:
    return MatchTransaction(
        transaction.hash,
        int(transaction.index or "0x0", 16),
        _fromhex(transaction.sender[2:]),
        _fromhex(transaction.to[2:]) if transaction.to else None,
        _uint256(transaction.value),
        int(transaction.nonce, 16),
        _fromhex(transaction.input[2:10]) if len(transaction.input) >= 10 else b"",
    )


def _uint256(text: str) -> int:
    """A value of 256 bits at most. Raises ValueError for all others: webhooks would deliver them."""
    value = int(text, 16) if len(text) <= _WORD else -1
    if value < 0:
        raise ValueError("not a value of 256 bits")
    return value


# Calls


class TracedCall(msgspec.Struct, rename={"kind": "type", "sender": "from"}, gc=False):
    """A call in `callTracer`'s result, with the calls that it made."""

    kind: str = ""
    sender: str = ""
    to: str | None = None
    value: str | None = None
    error: str | None = None
    calls: list[TracedCall] | None = None


class TracedTransaction(msgspec.Struct, rename={"hash": "txHash", "call": "result"}, gc=False):
    hash: str
    call: TracedCall


read_traced_call = msgspec.json.Decoder(TracedCall).decode
read_traced_transaction = msgspec.json.Decoder(TracedTransaction).decode


def calls_of_tree(transaction: str, tree: TracedCall) -> list[InternalTransfer]:
    """From `callTracer`'s result for a transaction, in the order of the calls."""
    calls: list[InternalTransfer] = []
    open_: list[tuple[TracedCall, tuple[int, ...]]] = [(tree, ())]
    while open_:
        node, path = open_.pop()
        if node.error:
            continue  # Reverted, together with all calls below it.
        if path and (call := _call(transaction, path, node)):
            calls.append(call)
        if node.calls:
            open_ += [(child, (*path, index)) for index, child in enumerate(node.calls)][::-1]
    return calls


def _call(transaction: str, path: tuple[int, ...], node: TracedCall) -> InternalTransfer | None:
    kind = node.kind.lower()
    value = _uint256(node.value or "0x0")
    if kind not in _MOVES or not value or not node.to:
        return None
    return InternalTransfer(transaction, path, kind, _fromhex(node.sender[2:]), _fromhex(node.to[2:]), value)


def calls_of_list(traces: list[Mapping[str, Any]]) -> list[InternalTransfer]:
    """From `trace_block`'s result for a block."""
    undone = {
        (trace["transactionHash"], tuple(trace["traceAddress"]))
        for trace in traces
        if trace.get("error") and trace.get("transactionHash")
    }
    calls = []
    for trace in traces:
        transaction, path = trace.get("transactionHash"), tuple(trace["traceAddress"])
        if not transaction or not path:
            continue  # A block's reward, or the transaction itself.
        if any((transaction, path[:length]) in undone for length in range(len(path) + 1)):
            continue
        if call := _traced(transaction, path, trace):
            calls.append(call)
    return calls


def _traced(transaction: str, path: tuple[int, ...], trace: Mapping[str, Any]) -> InternalTransfer | None:
    action = trace["action"]
    match trace["type"]:
        case "call" if action.get("callType") == "call":
            sender, recipient, value = action["from"], action["to"], action["value"]
        case "create":
            sender, recipient, value = action["from"], (trace.get("result") or {}).get("address"), action["value"]
        case "suicide" | "selfdestruct":
            sender, recipient, value = action["address"], action["refundAddress"], action["balance"]
        case _:
            return None
    if not recipient or not (amount := _uint256(value)):
        return None
    return InternalTransfer(
        transaction, path, str(trace["type"]), _fromhex(sender[2:]), _fromhex(recipient[2:]), amount
    )
