"""Estimates of gas prices: exact, the same from the same blocks, and never below the chain's floor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chains.evm import fees
from proxy.chains.evm.fees import Estimate

GWEI = 10**9


def history(
    base_fees: list[int], rewards: list[list[int]], ratios: list[float] | None = None, oldest: int = 100
) -> dict[str, Any]:
    return {
        "oldestBlock": hex(oldest),
        "baseFeePerGas": [hex(fee) for fee in base_fees],
        "gasUsedRatio": ratios or [0.5] * (len(base_fees) - 1),
        "reward": [[hex(tip) for tip in block] for block in rewards],
    }


def test_estimates_are_those_of_the_documents_example() -> None:
    base = 12_403_518_926
    tips = [GWEI // 10, GWEI, 2 * GWEI]
    found = fees.of_history(history([base, base], [tips]), floor_wei=0, block_time_s=12.0)
    assert (found.block, fees.gwei(found.base_fee_wei)) == (100, "12.403518926")
    shown = {
        tier: (fees.gwei(e.max_fee_wei), fees.gwei(e.max_priority_fee_wei), e.seconds)
        for tier, e in found.estimates.items()
    }
    assert shown == {
        "slow": ("13.743870819", "0.1", 60),
        "standard": ("15.884222711", "1", 24),
        "fast": ("17.504398658", "2", 12),
    }  # fmt: skip


def test_tip_is_the_median_over_blocks_that_were_not_empty() -> None:
    rewards = [[1, 1, 1], [0, 0, 0], [5, 50, 500], [3, 30, 300], [9, 90, 900]]
    found = fees.of_history(history([7] * 6, rewards, [0.1, 0.0, 1.0, 0.5, 0.9]), floor_wei=0, block_time_s=1.0)
    assert [e.max_priority_fee_wei for e in found.estimates.values()] == [4, 40, 400]
    assert found.block == 104


@pytest.mark.parametrize("rewards", [[], [[0, 0, 0]] * 2])
def test_floor_applies_without_tips(rewards: list[list[int]]) -> None:
    found = fees.of_history(history([0, 0, 0], rewards, [0.0, 0.0]), floor_wei=30 * GWEI, block_time_s=0.25)
    assert set(found.estimates.values()) == {
        Estimate(30 * GWEI, 30 * GWEI, 2), Estimate(30 * GWEI, 30 * GWEI, 1)
    }  # fmt: skip


def test_chain_without_base_fee_has_one_price_and_a_little_around_it() -> None:
    found = fees.of_gas_price(5 * GWEI, 42, floor_wei=GWEI, block_time_s=3.0)
    assert (found.block, found.base_fee_wei) == (42, 0)
    assert [fees.gwei(e.max_fee_wei) for e in found.estimates.values()] == ["4.5", "5", "5.5"]
    assert all(e.max_fee_wei == e.max_priority_fee_wei for e in found.estimates.values())


@pytest.mark.parametrize(
    "bad",
    [
        None, [], "0x1", {}, {"baseFeePerGas": []},
        history([1], []), history([1, 2], [[1, 2]]),
        {**history([1, 2], []), "oldestBlock": None}, {**history([1, 2], []), "baseFeePerGas": ["0x1", "zz"]},
        {**history([1, 2], []), "gasUsedRatio": [0.1, 0.2]},
    ],
)  # fmt: skip
def test_malformed_fee_history_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r".*"):
        fees.of_history(bad, floor_wei=0, block_time_s=1.0)


@given(
    base=st.integers(0, 10**15),
    floor=st.integers(0, 10**12),
    blocks=st.lists(st.lists(st.integers(0, 10**14), min_size=3, max_size=3).map(sorted), min_size=1, max_size=10),
)
def test_tiers_are_in_order_and_pay_for_the_next_block(base: int, floor: int, blocks: list[list[int]]) -> None:
    found = fees.of_history(history([base] * (len(blocks) + 1), blocks), floor_wei=floor, block_time_s=2.0)
    slow, standard, fast = found.estimates.values()
    assert slow.max_fee_wei <= standard.max_fee_wei <= fast.max_fee_wei
    assert slow.seconds >= standard.seconds >= fast.seconds >= 1
    for each in (slow, standard, fast):
        assert each.max_fee_wei >= base + each.max_priority_fee_wei
        assert each.max_priority_fee_wei >= floor


@given(st.integers(0, 10**40))
def test_gwei_is_exact_both_ways(wei: int) -> None:
    assert fees.wei_of(fees.gwei(wei)) == wei


def test_less_than_a_wei_is_cut_off() -> None:
    assert fees.wei_of("0.0000000019") == 1
    assert fees.wei_of("1.") == GWEI
