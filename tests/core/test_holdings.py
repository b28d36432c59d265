"""Sums of transfers: added, packed, taken back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.holdings import ZERO, HoldingChanges, Transfer

addresses = st.sampled_from([ZERO, *(bytes([n]) * 20 for n in range(1, 5))])
amounts = st.one_of(st.integers(0, 5), st.integers(0, 2**256 - 1))
transfers = st.lists(
    st.builds(
        Transfer,
        standard=st.sampled_from([20, 721, 1155]),
        contract=addresses,
        sender=addresses,
        recipient=addresses,
        amount=amounts,
        token_id=amounts,
        transaction=st.just("0x"),
        log_index=st.integers(0, 9),
    )
)


def sums(found: list[Transfer]) -> Counter[tuple[bytes, ...]]:
    held: Counter[tuple[bytes, ...]] = Counter()
    for each in found:
        rest = (each.contract,) if each.standard == 20 else (each.contract, each.token_id.to_bytes(32, "big"))
        held[each.sender, *rest] -= each.amount
        held[each.recipient, *rest] += each.amount
    return Counter({key: amount for key, amount in held.items() if amount and key[0] != ZERO})


def of(found: list[Transfer]) -> HoldingChanges:
    changes = HoldingChanges()
    changes.add(found)
    return changes


def plain(changes: HoldingChanges) -> dict[tuple[bytes, ...], int]:
    tokens: dict[tuple[bytes, ...], int] = {
        (key[:20], key[20:]): delta for key, delta in changes.tokens.items() if delta
    }
    return {**tokens, **{(key[:20], key[20:40], key[40:]): delta for key, delta in changes.nfts.items() if delta}}


@given(transfers)
def test_changes_are_the_sums_of_their_transfers(found: list[Transfer]) -> None:
    assert plain(of(found)) == sums(found)


@given(transfers, transfers)
def test_changes_of_two_blocks_are_the_sums_of_both(one: list[Transfer], other: list[Transfer]) -> None:
    changes = of(one)
    changes.include(of(other))
    assert plain(changes) == sums([*one, *other])


@given(transfers)
def test_changes_unpack_as_they_were_packed(found: list[Transfer]) -> None:
    changes = of(found)
    again = HoldingChanges.unpack(changes.pack())
    assert (again.tokens, again.nfts) == (changes.tokens, changes.nfts)
    assert all(again.standards[key[20:40]] == changes.standards[key[20:40]] for key in changes.nfts)


@given(transfers)
def test_reverted_changes_leave_nothing(found: list[Transfer]) -> None:
    changes = of(found)
    changes.include(HoldingChanges.unpack(changes.pack()).taken_back())
    assert plain(changes) == {}


def test_nothing_packs_into_nothing() -> None:
    assert HoldingChanges().pack() == b""
    assert len(HoldingChanges.unpack(b"")) == 0
    assert repr(HoldingChanges()) == "<HoldingChanges of 0 tokens, 0 nfts>"
