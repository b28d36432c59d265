"""Finds the webhooks that match the contents of a block.

A transaction is looked up by its two addresses, a transfer by these and by its contract (chains/evm/watch_index). Each
webhook found that way is checked against the rest of its filter. The cost does not depend on the number of webhooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from proxy.chains.evm import log_filter
from proxy.chains.evm.watch_index import (
    CATEGORIES,
    PAIRS,
    AddressBits,
    Direction,
    Watcher,
    Watchers,
    WatchFilter,
    WatchTable,
    WatchTables,
    each_of,
)
from proxy.core.holdings import FUNGIBLE, Transfer


class MatchTransaction(msgspec.Struct, gc=False):
    """A transaction. `recipient` is None if it creates a contract; `selector` is the first four bytes of its calldata."""

    hash: str
    index: int
    sender: bytes
    recipient: bytes | None
    value: int
    nonce: int
    selector: bytes


class InternalTransfer(msgspec.Struct, gc=False):
    """A transfer of coins inside a transaction; `path` leads to it among the calls."""

    transaction: str
    path: tuple[int, ...]
    kind: str
    sender: bytes
    recipient: bytes
    value: int


class MatchLog(log_filter.FilterLog, Protocol):
    """The parts of a log that are matched."""

    @property
    def transaction_hash(self) -> str: ...
    @property
    def log_index(self) -> str: ...


class Match(NamedTuple):
    """`direction` is set if the webhook watches one of the two sides. Without a `fact` it is the block itself."""

    watcher: Watcher
    fact: MatchTransaction | Transfer | InternalTransfer | MatchLog | None
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class MatchBlock:
    """The parts of a block that are matched."""

    transactions: Sequence[MatchTransaction] = ()
    transfers: Sequence[Transfer] = ()
    logs: Sequence[MatchLog] = ()


def matched(tables: WatchTables, block: MatchBlock) -> list[Match]:
    """Everything in a block that is watched, except calls inside transactions."""
    matches: list[Match] = [Match(each, None) for each in tables.blocks.values()]
    near = _near(tables.address_bits, block.transfers)
    if tables.activity:
        matches += _activity_of_transactions(
            tables.activity, _near_transactions(tables.address_bits, block.transactions)
        )
        matches += _activity_of_transfers(tables.activity, near)
    if tables.mined:
        get = tables.mined.get
        matches += [Match(each, tx) for tx in block.transactions for each in each_of(get(tx.hash))]
    if tables.token_side or tables.token_sender or tables.token_recipient:
        matches += _tokens_by_side(tables, near)
    if tables.token_contract or tables.tokens:
        matches += _tokens_by_contract(tables, block.transfers)
    if tables.nft_side:
        matches += _nfts_by_side(tables, near)
    if tables.nft_contract or tables.nft_token or tables.nfts:
        matches += _nfts_by_contract(tables, block.transfers)
    matches = _narrowed(matches, block)
    if tables.logs_of:
        matches += _logs(tables, block)
    return matches


def _narrowed(matches: list[Match], block: MatchBlock) -> list[Match]:
    """Drops events whose log does not match the filter's topics, and transfers in transactions that call another function."""
    if not any(each.watcher.is_narrow for each in matches):
        return matches
    selectors = {tx.hash: tx.selector for tx in block.transactions}
    logs = {int(log.log_index, 16): log for log in block.logs}
    return [each for each in matches if not each.watcher.is_narrow or _fits(each, selectors, logs)]


def _fits(match: Match, selectors: Mapping[str, bytes], logs: Mapping[int, MatchLog]) -> bool:
    wanted, fact = match.watcher.filter, match.fact
    if not isinstance(fact, Transfer):
        return not wanted.topics
    log = logs.get(fact.log_index)
    return (not wanted.selectors or selectors.get(fact.transaction) in wanted.selectors) and (
        not wanted.topics or (log is not None and log_filter.LogFilter(topics=wanted.topics).matches(log))
    )


def _near_transactions(address_bits: AddressBits, transactions: Iterable[MatchTransaction]) -> list[MatchTransaction]:
    """Facts with an address that may be watched. Inlined for speed, like `_near`: both run for every fact."""
    bits, mask = address_bits.bits, address_bits.mask
    return [
        tx
        for tx in transactions
        if bits[(number := hash(tx.sender)) & mask] & (pair := PAIRS[number >> 40 & 31]) == pair
        or bits[(number := hash(tx.recipient)) & mask] & (pair := PAIRS[number >> 40 & 31]) == pair
    ]


def _near(address_bits: AddressBits, transfers: Iterable[Transfer]) -> list[Transfer]:
    bits, mask = address_bits.bits, address_bits.mask
    return [
        transfer
        for transfer in transfers
        if bits[(number := hash(transfer.sender)) & mask] & (pair := PAIRS[number >> 40 & 31]) == pair
        or bits[(number := hash(transfer.recipient)) & mask] & (pair := PAIRS[number >> 40 & 31]) == pair
    ]


def matched_calls(tables: WatchTables, calls: Iterable[InternalTransfer]) -> list[Match]:
    return [*_sides(tables.internal, ((call, call.sender, call.recipient, call.value) for call in calls))]


def matched_pending(tables: WatchTables, transactions: Iterable[MatchTransaction]) -> list[Match]:
    return _activity_of_transactions(tables.pending, transactions)


def _activity_of_transactions(table: WatchTable, transactions: Iterable[MatchTransaction]) -> list[Match]:
    get = table.get
    matches: list[Match] = []
    for tx in transactions:
        if (sent := get(tx.sender)) is not None:
            matches += [Match(each, tx, "outgoing") for each in each_of(sent) if _wants_tx(each, tx, "outgoing")]
        if (came := get(tx.recipient)) is not None:
            matches += [Match(each, tx, "incoming") for each in each_of(came) if _wants_tx(each, tx, "incoming")]
    return matches


def _wants_tx(watcher: Watcher, tx: MatchTransaction, direction: Direction) -> bool:
    wanted = watcher.filter
    return (
        not watcher.gone
        and tx.value >= wanted.min_value
        and (wanted.direction is None or wanted.direction == direction)
        and (not wanted.categories or "native" in wanted.categories)
        and (not wanted.selectors or tx.selector in wanted.selectors)
    )


def _activity_of_transfers(table: WatchTable, transfers: Iterable[Transfer]) -> list[Match]:
    get = table.get
    matches: list[Match] = []
    for each in transfers:
        if (sent := get(each.sender)) is not None:
            matches += [Match(who, each, "outgoing") for who in each_of(sent) if _wants_transfer(who, each, "outgoing")]
        if (came := get(each.recipient)) is not None:
            matches += [Match(who, each, "incoming") for who in each_of(came) if _wants_transfer(who, each, "incoming")]
    return matches


def _wants_transfer(watcher: Watcher, transfer: Transfer, direction: Direction) -> bool:
    """A filter for functions matches transactions only: a transfer calls none."""
    wanted = watcher.filter
    return (
        not watcher.gone
        and not wanted.selectors
        and (wanted.direction is None or wanted.direction == direction)
        and (not wanted.categories or CATEGORIES[transfer.standard] in wanted.categories)
        and (transfer.amount >= wanted.min_value or transfer.standard != FUNGIBLE)
        and not (wanted.exclude_spam and transfer.amount == 0)
    )


def _sides(table: WatchTable, facts: Iterable[tuple[InternalTransfer, bytes, bytes, int]]) -> Iterator[Match]:
    """Facts with two sides and a value, by each side that is watched."""
    for fact, sender, recipient, value in facts:
        sides: tuple[tuple[bytes, Direction], ...] = ((sender, "outgoing"), (recipient, "incoming"))
        for address, direction in sides:
            for each in each_of(table.get(address)):
                wanted = each.filter
                if each.gone or value < wanted.min_value or wanted.direction not in (None, direction):
                    continue
                yield Match(each, fact, direction)


def _tokens_by_side(tables: WatchTables, transfers: Iterable[Transfer]) -> list[Match]:
    side, sender, recipient = tables.token_side.get, tables.token_sender.get, tables.token_recipient.get
    matches: list[Match] = []
    for transfer in transfers:
        if transfer.standard != FUNGIBLE:
            continue
        candidates = [*_either(side(transfer.sender), side(transfer.recipient))]
        candidates += each_of(sender(transfer.sender))
        candidates += each_of(recipient(transfer.recipient))
        matches += [Match(each, transfer) for each in candidates if not each.gone and _is_token(each.filter, transfer)]
    return matches


def _tokens_by_contract(tables: WatchTables, transfers: Iterable[Transfer]) -> list[Match]:
    contract, tokens = tables.token_contract.get, tables.tokens
    matches: list[Match] = []
    for transfer in transfers:
        if transfer.standard != FUNGIBLE:
            continue
        ranked = contract(transfer.contract)
        candidates = [*(ranked.of(transfer.amount) if ranked is not None else ()), *tokens.of(transfer.amount)]
        matches += [Match(each, transfer) for each in candidates if _is_token(each.filter, transfer)]
    return matches


def _is_token(wanted: WatchFilter, transfer: Transfer) -> bool:
    return (
        transfer.amount >= wanted.min_value
        and (not wanted.contracts or transfer.contract in wanted.contracts)
        and (not wanted.senders or transfer.sender in wanted.senders)
        and (not wanted.recipients or transfer.recipient in wanted.recipients)
        and not (wanted.exclude_spam and transfer.amount == 0)
    )


def _nfts_by_side(tables: WatchTables, transfers: Iterable[Transfer]) -> list[Match]:
    side = tables.nft_side.get
    return [
        Match(each, transfer)
        for transfer in transfers
        if transfer.standard != FUNGIBLE
        for each in _either(side(transfer.sender), side(transfer.recipient))
        if not each.gone and _is_nft(each.filter, transfer)
    ]


def _nfts_by_contract(tables: WatchTables, transfers: Iterable[Transfer]) -> list[Match]:
    contract, token, everything = tables.nft_contract.get, tables.nft_token.get, tables.nfts.values()
    matches: list[Match] = []
    for transfer in transfers:
        if transfer.standard == FUNGIBLE:
            continue
        candidates = [*each_of(contract(transfer.contract)), *everything]
        candidates += each_of(token((transfer.contract, transfer.token_id)))
        matches += [Match(each, transfer) for each in candidates if _is_nft(each.filter, transfer)]
    return matches


def _is_nft(wanted: WatchFilter, transfer: Transfer) -> bool:
    return (
        (not wanted.contracts or transfer.contract in wanted.contracts)
        and (not wanted.token_ids or transfer.token_id in wanted.token_ids)
        and not (wanted.exclude_spam and transfer.amount == 0)
    )


def _either(one: Watchers | None, other: Watchers | None) -> Iterable[Watcher]:
    """The watchers of either side, each once."""
    if one is None or other is None:
        return each_of(other if one is None else one)
    return dict.fromkeys((*each_of(one), *each_of(other)))


def _logs(tables: WatchTables, block: MatchBlock) -> list[Match]:
    matches: list[Match] = []
    selectors: dict[str, bytes] = {}
    for wanted, places in tables.logs.match(block.logs).items():
        for each in tables.logs_of[wanted]:
            if each.filter.selectors and not selectors:
                selectors = {tx.hash: tx.selector for tx in block.transactions}
            for place in places:
                log = block.logs[place]
                if not each.filter.selectors or selectors.get(log.transaction_hash) in each.filter.selectors:
                    matches.append(Match(each, log))
    return matches
