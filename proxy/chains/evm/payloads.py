"""The `data` of an event in both formats, with the specification's fields.

Data that only the chain or a token's contract can supply is left open and listed in `lacks`: the receipt of a
transaction (its status), a token's symbol and decimals, an NFT's metadata. `completed` adds it later. A failed
transaction has moved nothing: it is an event of `address_activity`, with its status and the value 0, and of
`mined_transaction`, but of no type that reports what an address sent or received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.chains.evm import address
from proxy.chains.evm.facts import ChainLog, Header
from proxy.chains.evm.matching import InternalTransfer, Match, MatchTransaction
from proxy.chains.evm.watch_index import CATEGORIES, KINDS, Watcher
from proxy.core import units
from proxy.core.attempts import format_of
from proxy.core.holdings import FUNGIBLE, ZERO, Transfer

_STANDARDS = {721: "ERC721", 1155: "ERC1155"}
_read_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class EventContext:
    """The chain, block and time (ISO 8601) of an event. `symbol` and `decimals` are of its coin. No `block`: the mempool."""

    chain: str
    symbol: str
    decimals: int
    block: int | None = None
    hash: str = ""
    time: str = ""


@dataclass(frozen=True, slots=True)
class EventToken:
    """A token's own data; None where the contract returns none."""

    symbol: str | None
    decimals: int | None


@dataclass(frozen=True, slots=True)
class EventPayload:
    """`at`: the position in the block, from which the event's id is derived. `lacks`: the missing parts, as JSON."""

    at: tuple[str, ...]
    data: dict[str, Any]
    lacks: dict[str, Any] = field(default_factory=dict)


def payload_of(
    match: Match, context: EventContext, *, header: Header | None, tokens: Mapping[bytes, EventToken]
) -> EventPayload:
    """`tokens`: tokens whose data is known already."""
    watcher, fact = match.watcher, match.fact
    is_a = format_of(watcher.event_type) == "A"
    side = () if match.direction is None else (match.direction,)
    match fact:
        case MatchTransaction() if watcher.kind == "mined":
            return EventPayload((fact.hash,), _mined(fact, context, watcher, is_a=is_a), {"transaction": fact.hash})
        case MatchTransaction() if watcher.kind == "pending":
            return EventPayload((fact.hash, *side), _pending(fact, context, match.direction))
        case MatchTransaction():
            data = _native(fact, context, match.direction, is_a=is_a)
            lacks = {"transaction": fact.hash, **({"success": True} if needs_success(watcher) else {})}
            return EventPayload((fact.hash, "", *side), data, lacks)
        case Transfer() if watcher.kind == "activity":
            return _moved(match, fact, context, tokens, is_a=is_a)
        case Transfer() if fact.standard == FUNGIBLE:
            data = _token(fact, context, is_a=is_a)
            return _known(EventPayload(_at(fact), data), fact.contract, tokens)
        case Transfer():
            lacks = {} if is_a else {"nft": ["0x" + fact.contract.hex(), str(fact.token_id)]}
            return EventPayload(_at(fact), _nft(fact, context, is_a=is_a), lacks)
        case InternalTransfer():
            return EventPayload(
                (fact.transaction, "call", *map(str, fact.path), *side), _internal(fact, context, match.direction)
            )
        case ChainLog():
            return EventPayload((fact.transaction_hash, fact.log_index), _log(fact, context))
        case _:
            assert header is not None
            return EventPayload((), _block(header, context))


def needs_success(watcher: Watcher) -> bool:
    """Whether a failed transaction is left out for this webhook, because it moved nothing."""
    return watcher.kind != "mined" and (format_of(watcher.event_type) == "B" or watcher.filter.min_value > 0)


def _at(fact: Transfer, *more: str) -> tuple[str, ...]:
    return (fact.transaction, hex(fact.log_index), *((str(fact.item),) if fact.item else ()), *more)


def _known(payload: EventPayload, contract: bytes, tokens: Mapping[bytes, EventToken]) -> EventPayload:
    """With the token's data, if it is known."""
    token = tokens.get(contract)
    if token is None:
        return EventPayload(payload.at, payload.data, {"token": "0x" + contract.hex()})
    put_token(payload.data, token)
    return payload


def completed(
    event_type: str,
    data: dict[str, Any],
    *,
    receipt: Mapping[str, Any] | None = None,
    needs_success: bool = False,
    token: EventToken | None = None,
    nft: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The data with its missing parts added; None if there is no event after all."""
    if receipt is not None:
        # Receipts from before Byzantium have no status.
        has_failed = int(receipt.get("status") or "0x1", 16) == 0
        if has_failed and (needs_success or event_type == "ADDRESS_ACTIVITY"):
            return None
        if data["to"] is None and not has_failed and (contract := receipt.get("contractAddress")):
            data["to"] = address.checksum(bytes.fromhex(contract[2:]))
        if event_type != "ADDRESS_ACTIVITY":
            data["status"] = "failed" if has_failed else "success"
        if KINDS[event_type] == "mined":
            data["gas_used" if "gas_used" in data else "gasUsed"] = int(receipt["gasUsed"], 16)
        elif has_failed:
            data["value"] = "0"
    if token is not None:
        put_token(data, token)
    if nft is not None:
        data["metadata"] = {
            "name": nft["name"],
            "description": nft["description"],
            "imageUrl": nft["image_url"],
            "imageGatewayUrl": nft["image_gateway_url"],
            "traits": [{"traitType": each["trait_type"], "value": each["value"]} for each in nft["traits"]],
        }
    return data


def put_token(data: dict[str, Any], token: EventToken) -> None:
    """Adds a token's symbol and decimals if the data has members for them."""
    if "asset" in data:
        data["asset"] = token.symbol
    if "symbol" in data:
        data["symbol"], data["decimals"] = token.symbol, token.decimals
    if "token" in data:
        data["token"] |= {"symbol": token.symbol, "decimals": token.decimals}
        if data["valueFormatted"] is None and token.decimals is not None:
            data["valueFormatted"] = units.formatted(int(data["value"]), token.decimals)


# Both formats


def _native(tx: MatchTransaction, context: EventContext, direction: str | None, *, is_a: bool) -> dict[str, Any]:
    if is_a:
        return {
            "chain": context.chain,
            "block_number": context.block,
            "tx_hash": tx.hash,
            "from": address.checksum(tx.sender),
            "to": _text(tx.recipient),
            "value": str(tx.value),
            "asset": context.symbol,
            "contract": None,
            "direction": direction,
            "status": None,
        }
    return {
        "blockNumber": context.block,
        "transactionHash": tx.hash,
        "logIndex": None,
        "from": address.checksum(tx.sender),
        "to": _text(tx.recipient),
        "value": str(tx.value),
        "valueFormatted": units.formatted(tx.value, context.decimals),
        "asset": context.symbol,
        "category": "native",
        "token": None,
        "tokenId": None,
        "direction": direction,
    }


def _moved(
    match: Match, fact: Transfer, context: EventContext, tokens: Mapping[bytes, EventToken], *, is_a: bool
) -> EventPayload:
    """A token, or an NFT, of a watched address."""
    assert match.direction is not None
    nft_id = None if fact.standard == FUNGIBLE else str(fact.token_id)
    data: dict[str, Any]
    if is_a:
        data = {
            "chain": context.chain,
            "block_number": context.block,
            "tx_hash": fact.transaction,
            "from": address.checksum(fact.sender),
            "to": address.checksum(fact.recipient),
            "value": str(fact.amount),
            "asset": None,
            "contract": address.checksum(fact.contract),
            "direction": match.direction,
            "status": "success",
        }
        if nft_id is not None:
            data["token_id"] = nft_id
    else:
        data = {
            "blockNumber": context.block,
            "transactionHash": fact.transaction,
            "logIndex": fact.log_index,
            "from": address.checksum(fact.sender),
            "to": address.checksum(fact.recipient),
            "value": str(fact.amount),
            "valueFormatted": None if nft_id is None else str(fact.amount),
            "asset": None,
            "category": CATEGORIES[fact.standard],
            "token": {"address": address.checksum(fact.contract), "symbol": None, "decimals": None},
            "tokenId": nft_id,
            "direction": match.direction,
        }
    return _known(EventPayload(_at(fact, match.direction), data), fact.contract, tokens)


def _token(fact: Transfer, context: EventContext, *, is_a: bool) -> dict[str, Any]:
    if is_a:
        return {
            "chain": context.chain,
            "block_number": context.block,
            "tx_hash": fact.transaction,
            "contract": address.checksum(fact.contract),
            "from": address.checksum(fact.sender),
            "to": address.checksum(fact.recipient),
            "value": str(fact.amount),
            "symbol": None,
            "decimals": None,
        }
    return {
        "blockNumber": context.block,
        "transactionHash": fact.transaction,
        "logIndex": fact.log_index,
        "from": address.checksum(fact.sender),
        "to": address.checksum(fact.recipient),
        "token": {"address": address.checksum(fact.contract), "symbol": None, "decimals": None},
        "value": str(fact.amount),
        "valueFormatted": None,
    }


def _nft(fact: Transfer, context: EventContext, *, is_a: bool) -> dict[str, Any]:
    if is_a:
        return {
            "chain": context.chain,
            "block_number": context.block,
            "tx_hash": fact.transaction,
            "contract": address.checksum(fact.contract),
            "from": address.checksum(fact.sender),
            "to": address.checksum(fact.recipient),
            "token_id": str(fact.token_id),
            "standard": _STANDARDS[fact.standard],
            "quantity": fact.amount,
        }
    return {
        "blockNumber": context.block,
        "transactionHash": fact.transaction,
        "logIndex": fact.log_index,
        "activity": "mint" if fact.sender == ZERO else "burn" if fact.recipient == ZERO else "transfer",
        "from": address.checksum(fact.sender),
        "to": address.checksum(fact.recipient),
        "contract": address.checksum(fact.contract),
        "tokenId": str(fact.token_id),
        "standard": _STANDARDS[fact.standard],
        "quantity": fact.amount,
        "metadata": None,
    }


def _mined(tx: MatchTransaction, context: EventContext, watcher: Watcher, *, is_a: bool) -> dict[str, Any]:
    confirmations = max(1, watcher.filter.confirmations)
    if is_a:
        return {
            "chain": context.chain,
            "block_number": context.block,
            "tx_hash": tx.hash,
            "from": address.checksum(tx.sender),
            "to": _text(tx.recipient),
            "value": str(tx.value),
            "status": None,
            "gas_used": None,
            "confirmations": confirmations,
        }
    return {
        "blockNumber": context.block,
        "blockHash": context.hash,
        "transactionHash": tx.hash,
        "transactionIndex": tx.index,
        "from": address.checksum(tx.sender),
        "to": _text(tx.recipient),
        "value": str(tx.value),
        "valueFormatted": units.formatted(tx.value, context.decimals),
        "nonce": tx.nonce,
        "status": None,
        "gasUsed": None,
        "confirmations": confirmations,
    }


# One format alone


def _log(log: ChainLog, context: EventContext) -> dict[str, Any]:
    return {
        "chain": context.chain,
        "block_number": context.block,
        "tx_hash": log.transaction_hash,
        "log_index": int(log.log_index, 16),
        "contract": address.checksum(bytes.fromhex(log.address[2:])),
        "topics": log.topics,
        "data": log.data,
    }


def _internal(call: InternalTransfer, context: EventContext, direction: str | None) -> dict[str, Any]:
    return {
        "blockNumber": context.block,
        "transactionHash": call.transaction,
        "traceAddress": list(call.path),
        "callType": call.kind,
        "from": address.checksum(call.sender),
        "to": address.checksum(call.recipient),
        "value": str(call.value),
        "valueFormatted": units.formatted(call.value, context.decimals),
        "asset": context.symbol,
        "direction": direction,
    }


def _pending(tx: MatchTransaction, context: EventContext, direction: str | None) -> dict[str, Any]:
    return {
        "transactionHash": tx.hash,
        "from": address.checksum(tx.sender),
        "to": _text(tx.recipient),
        "value": str(tx.value),
        "valueFormatted": units.formatted(tx.value, context.decimals),
        "asset": context.symbol,
        "nonce": tx.nonce,
        "selector": "0x" + tx.selector.hex() if tx.selector else None,
        "direction": direction,
    }


def _block(header: Header, context: EventContext) -> dict[str, Any]:
    return {
        "blockNumber": context.block,
        "blockHash": header.hash,
        "parentHash": header.parent_hash,
        "timestamp": context.time,
        "gasUsed": int(header.gas_used, 16),
        "transactionCount": len(_read_raw(header.transactions)),
    }


def _text(recipient: bytes | None) -> str | None:
    return None if recipient is None else address.checksum(recipient)
