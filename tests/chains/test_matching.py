"""The index of webhooks against a plain scan over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.chains.evm import log_filter, matching, watch_index
from proxy.chains.evm.log_filter import LogFilter
from proxy.chains.evm.matching import InternalTransfer, MatchBlock, MatchTransaction
from proxy.chains.evm.watch_index import KINDS, Watcher, WatchFilter, WatchIndex
from proxy.core.holdings import Transfer

ADDRESSES = [bytes([n]) * 20 for n in range(1, 7)]
CONTRACTS = [bytes([n]) * 20 for n in range(101, 104)]
HASHES = ["0x" + f"{n:064x}" for n in range(4)]
TOPICS = ["0x" + f"{n:064x}" for n in range(1000, 1004)]
SELECTORS = [b"\xaa" * 4, b"\xbb" * 4]


class Log(msgspec.Struct):
    address: str
    topics: list[str]
    transaction_hash: str
    log_index: str = "0x0"


def text(address: bytes) -> str:
    return "0x" + address.hex()


@dataclass
class Hook:
    """A webhook as the scan sees it."""

    watcher: Watcher
    addresses: set[bytes]


addresses = st.sets(st.sampled_from(ADDRESSES), min_size=1, max_size=4)
contracts = st.frozensets(st.sampled_from(CONTRACTS), min_size=1, max_size=2)
NOTHING: frozenset[bytes] = frozenset()
some_contracts = st.one_of(st.just(NOTHING), contracts)
some_addresses = st.one_of(st.just(NOTHING), st.frozensets(st.sampled_from(ADDRESSES), min_size=1, max_size=3))
directions = st.sampled_from([None, "incoming", "outgoing"])
values = st.integers(0, 5)
topic_filters = st.lists(
    st.one_of(st.none(), st.lists(st.sampled_from(TOPICS), min_size=1, max_size=2, unique=True)), max_size=2
).map(lambda places: log_filter.parse({"topics": places}).topics)
selector_filters = st.frozensets(st.sampled_from(SELECTORS), max_size=1)


@st.composite
def hooks(draw: st.DrawFn, name: str = "wh") -> Hook:
    event_type = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[event_type]
    given: dict[str, Any] = {}
    listed = kind in ("activity", "internal", "pending") or (kind in ("token", "nft", "log") and draw(st.booleans()))
    match kind:
        case "activity" | "pending":
            given = {
                "direction": draw(directions),
                "min_value": draw(values),
                "selectors": draw(st.frozensets(st.sampled_from(SELECTORS))),
                "categories": draw(st.frozensets(st.sampled_from(["native", "erc20", "erc721", "erc1155"]))),
                "exclude_spam": draw(st.booleans()),
                "topics": draw(topic_filters),
            }
            if kind == "pending":
                given["categories"], given["topics"] = frozenset(), ()
        case "internal":
            given = {"direction": draw(directions), "min_value": draw(values)}
        case "token":
            given = {
                "contracts": draw(some_contracts),
                "senders": draw(some_addresses),
                "recipients": draw(some_addresses),
                "min_value": draw(values),
                "exclude_spam": draw(st.booleans()),
                "topics": draw(topic_filters),
                "selectors": draw(selector_filters),
            }
        case "nft":
            given = {
                "contracts": draw(some_contracts),
                "topics": draw(topic_filters),
                "selectors": draw(selector_filters),
            }
            if given["contracts"]:
                given["token_ids"] = draw(st.frozensets(st.integers(0, 3), max_size=2))
        case "mined":
            given = {"tx_hashes": draw(st.frozensets(st.sampled_from(HASHES), min_size=1))}
        case "log":
            given = {"topics": draw(topic_filters), "selectors": draw(selector_filters)}
        case _:
            pass
    watcher = Watcher(name, event_type, WatchFilter(**given), listed=listed)
    return Hook(watcher, draw(addresses) if listed else set())


transactions = st.builds(
    MatchTransaction,
    hash=st.sampled_from(HASHES),
    index=st.just(0),
    sender=st.sampled_from(ADDRESSES),
    recipient=st.one_of(st.none(), st.sampled_from(ADDRESSES)),
    value=values,
    nonce=st.just(0),
    selector=st.sampled_from([b"", *SELECTORS]),
)
transfers = st.builds(
    Transfer,
    standard=st.sampled_from([20, 721, 1155]),
    contract=st.sampled_from(CONTRACTS),
    sender=st.sampled_from(ADDRESSES),
    recipient=st.sampled_from(ADDRESSES),
    amount=values,
    token_id=st.integers(0, 3),
    transaction=st.sampled_from(HASHES),
    log_index=st.integers(0, 3),
)
logs = st.builds(
    Log,
    address=st.sampled_from([text(each) for each in ADDRESSES]),
    topics=st.lists(st.sampled_from(TOPICS), max_size=4),
    transaction_hash=st.sampled_from(HASHES),
    log_index=st.integers(0, 3).map(hex),
)
calls = st.builds(
    InternalTransfer,
    transaction=st.sampled_from(HASHES),
    path=st.just((0,)),
    kind=st.just("call"),
    sender=st.sampled_from(ADDRESSES),
    recipient=st.sampled_from(ADDRESSES),
    value=values,
)
blocks = st.builds(
    MatchBlock,
    # One hash each: a selector is looked up by it.
    transactions=st.lists(transactions, max_size=5, unique_by=lambda tx: tx.hash),
    transfers=st.lists(transfers, max_size=8),
    # One index each: the topics of a transfer are looked up by it.
    logs=st.lists(logs, max_size=4, unique_by=lambda log: log.log_index),
)


def scan(hook: Hook, block: MatchBlock) -> list[tuple[str, int, str | None]]:
    """All matches, found by comparing everything with everything: (webhook, the fact, the side)."""
    wanted = hook.watcher.filter
    found: list[tuple[str, int, str | None]] = []
    name = hook.watcher.id
    match hook.watcher.kind:
        case "block":
            found.append((name, 0, None))
        case "mined":
            found += [(name, id(tx), None) for tx in block.transactions if tx.hash in wanted.tx_hashes]
        case "activity":
            found += of_transactions(hook, [] if wanted.topics else block.transactions)
            for t in block.transfers:
                category = {20: "erc20", 721: "erc721", 1155: "erc1155"}[t.standard]
                for address, side in ((t.sender, "outgoing"), (t.recipient, "incoming")):
                    if (
                        address in hook.addresses
                        and wanted.direction in (None, side)
                        and (not wanted.categories or category in wanted.categories)
                        and not wanted.selectors
                        and has_topics(hook, t, block)
                        and (t.standard != 20 or t.amount >= wanted.min_value)
                        and not (wanted.exclude_spam and t.amount == 0)
                    ):
                        found.append((name, id(t), side))
        case "token":
            for t in block.transfers:
                if (
                    t.standard == 20
                    and (not hook.watcher.listed or {t.sender, t.recipient} & hook.addresses)
                    and (not wanted.contracts or t.contract in wanted.contracts)
                    and (not wanted.senders or t.sender in wanted.senders)
                    and (not wanted.recipients or t.recipient in wanted.recipients)
                    and t.amount >= wanted.min_value
                    and not (wanted.exclude_spam and t.amount == 0)
                    and has_topics(hook, t, block)
                    and calls_selected(hook, t.transaction, block)
                ):
                    found.append((name, id(t), None))
        case "nft":
            for t in block.transfers:
                if (
                    t.standard != 20
                    and (not hook.watcher.listed or {t.sender, t.recipient} & hook.addresses)
                    and (not wanted.contracts or t.contract in wanted.contracts)
                    and (not wanted.token_ids or t.token_id in wanted.token_ids)
                    and has_topics(hook, t, block)
                    and calls_selected(hook, t.transaction, block)
                ):
                    found.append((name, id(t), None))
        case "log":
            for log in block.logs:
                if hook.watcher.listed and log.address not in {text(each) for each in hook.addresses}:
                    continue
                if fits(wanted.topics, log.topics) and calls_selected(hook, log.transaction_hash, block):
                    found.append((name, id(log), None))
        case _:
            pass
    return found


def fits(wanted: tuple[bytes, ...], topics: Sequence[str]) -> bool:
    places: list[list[str] | None] = LogFilter(topics=wanted).params().get("topics", [])
    return len(places) <= len(topics) and all(
        not place or topic in place for place, topic in zip(places, topics, strict=False)
    )


def has_topics(hook: Hook, transfer: Transfer, block: MatchBlock) -> bool:
    wanted = hook.watcher.filter.topics
    return not wanted or any(
        int(log.log_index, 16) == transfer.log_index and fits(wanted, log.topics) for log in block.logs
    )


def calls_selected(hook: Hook, transaction: str, block: MatchBlock) -> bool:
    wanted = hook.watcher.filter.selectors
    return not wanted or any(tx.hash == transaction and tx.selector in wanted for tx in block.transactions)


def of_transactions(hook: Hook, txs: Any) -> list[tuple[str, int, str | None]]:
    wanted = hook.watcher.filter
    return [
        (hook.watcher.id, id(tx), side)
        for tx in txs
        for address, side in ((tx.sender, "outgoing"), (tx.recipient, "incoming"))
        if address in hook.addresses
        and wanted.direction in (None, side)
        and tx.value >= wanted.min_value
        and (not wanted.selectors or tx.selector in wanted.selectors)
        and (not wanted.categories or "native" in wanted.categories)
    ]


def found_in(index: WatchIndex, block: MatchBlock) -> Counter[tuple[str, int, str | None]]:
    return Counter(
        (match.watcher.id, 0 if match.fact is None else id(match.fact), match.direction)
        for match in matching.matched(index.tables, block)
    )


def put(index: WatchIndex, hook: Hook) -> None:
    index.put(hook.watcher)
    if hook.watcher.listed:
        index.watch(hook.watcher.id, [*hook.addresses])


many = st.integers(1, 8).flatmap(lambda n: st.tuples(*(hooks(f"wh_{each}") for each in range(n))))


@settings(max_examples=200, deadline=None)
@given(many, blocks, st.data())
def test_index_finds_what_a_scan_finds_whatever_was_added_and_removed(
    given_hooks: tuple[Hook, ...], block: MatchBlock, data: st.DataObject
) -> None:
    index = WatchIndex()
    for hook in given_hooks:
        put(index, hook)
    standing = list(given_hooks)
    for hook in data.draw(st.lists(st.sampled_from(given_hooks), max_size=3, unique_by=id)):
        if hook.watcher.listed and data.draw(st.booleans()):
            gone = data.draw(st.sets(st.sampled_from(sorted(hook.addresses))))
            index.unwatch(hook.watcher.id, [*gone])
            hook.addresses -= gone
            new = data.draw(st.sets(st.sampled_from(ADDRESSES))) - hook.addresses
            index.watch(hook.watcher.id, [*new])
            hook.addresses |= new
        else:
            index.remove(hook.watcher.id)
            standing.remove(hook)
    expected = Counter(each for hook in standing for each in scan(hook, block))
    assert found_in(index, block) == expected
    assert len(index) == len(standing)


@settings(max_examples=50, deadline=None)
@given(many, st.lists(calls, max_size=6), st.lists(transactions, max_size=6))
def test_calls_and_pending_transactions_are_found_by_those_who_watch_them(
    given_hooks: tuple[Hook, ...], inner: list[InternalTransfer], txs: list[MatchTransaction]
) -> None:
    index = WatchIndex()
    for hook in given_hooks:
        put(index, hook)
    pending = [hook for hook in given_hooks if hook.watcher.kind == "pending"]
    internal = [hook for hook in given_hooks if hook.watcher.kind == "internal"]
    found = Counter((m.watcher.id, id(m.fact), m.direction) for m in matching.matched_pending(index.tables, txs))
    assert found == Counter(each for hook in pending for each in of_transactions(hook, txs))
    found = Counter((m.watcher.id, id(m.fact), m.direction) for m in matching.matched_calls(index.tables, inner))
    assert found == Counter(
        (hook.watcher.id, id(call), side)
        for hook in internal
        for call in inner
        for address, side in ((call.sender, "outgoing"), (call.recipient, "incoming"))
        if address in hook.addresses
        and hook.watcher.filter.direction in (None, side)
        and call.value >= hook.watcher.filter.min_value
    )


def activity(name: str, *watched: bytes) -> Hook:
    return Hook(Watcher(name, "address_activity", WatchFilter(), listed=True), {*watched})


def test_webhook_in_anothers_place_leaves_nothing_of_it() -> None:
    index = WatchIndex()
    tx = MatchTransaction(HASHES[0], 0, ADDRESSES[0], ADDRESSES[1], 1, 0, b"")
    put(index, activity("wh", ADDRESSES[0]))
    put(index, activity("wh", ADDRESSES[1]))
    (match,) = matching.matched(index.tables, MatchBlock([tx]))
    assert match.direction == "incoming"


def test_dead_addresses_are_swept_out_when_they_are_many() -> None:
    index = WatchIndex()
    for name in ("one", "two"):
        put(index, activity(name, *(n.to_bytes(20, "big") for n in range(watch_index.FEW_DEAD + 1))))
    index.remove("one")
    assert len(index.tables.activity) == watch_index.FEW_DEAD + 1
    index.remove("two")
    assert not index.tables.activity
    assert repr(index) == "<WatchIndex 0 webhooks, 0 addresses>"


def test_marks_grow_with_what_is_watched() -> None:
    index = WatchIndex()
    watched = [n.to_bytes(20, "big") for n in range(1, 5001)]
    put(index, activity("wh", *watched))
    assert len(index.tables.address_bits.bits) * 8 * 2 >= len(watched) * watch_index.SPARSE
    txs = [MatchTransaction(HASHES[0], 0, each, None, 1, 0, b"") for each in watched]
    assert len(matching.matched(index.tables, MatchBlock(txs))) == len(watched)


def test_empty_list_of_addresses_watches_nothing() -> None:
    """Not everything: the last address of a filter may be taken away."""
    index = WatchIndex()
    hook = Hook(Watcher("wh", "log", WatchFilter(), listed=True), set())
    put(index, hook)
    put(index, Hook(Watcher("wh2", "token_transfer", WatchFilter(), listed=True), set()))
    log = Log(text(ADDRESSES[0]), [], HASHES[0])
    transfer = Transfer(20, CONTRACTS[0], ADDRESSES[0], ADDRESSES[1], 1, 0, HASHES[0], 0)
    assert matching.matched(index.tables, MatchBlock([], [transfer], [log])) == []
