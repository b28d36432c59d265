"""Gas price estimates: three tiers, computed from recent blocks.

A block's *tip* at a percentile is the most that this share of its gas paid above the base fee. Each tier is the median
over recent blocks that were not empty, at least the chain's minimum, plus a maximum fee that leaves room for the base
fee to rise. A chain without a base fee has one price, and tiers a little below and above it. All amounts are whole wei:
the same blocks give the same estimates in every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from proxy.core.units import formatted

Tier = Literal["slow", "standard", "fast"]
GWEI_DECIMALS = 9
HISTORY_BLOCKS = 10


@dataclass(frozen=True, slots=True)
class TierTarget:
    """A tier: the percentile of tips, the percentage of the next base fee, and the blocks that it may wait."""

    percentile: int
    base_percent: int
    blocks: int
    # The percentage of eth_gasPrice on chains without a base fee.
    price_percent: int


AIMS: Mapping[Tier, TierTarget] = {
    "slow": TierTarget(10, 110, 5, 90),
    "standard": TierTarget(50, 120, 2, 100),
    "fast": TierTarget(90, 125, 1, 110),
}
PERCENTILES = tuple(aim.percentile for aim in AIMS.values())


@dataclass(frozen=True, slots=True)
class Estimate:
    max_fee_wei: int
    max_priority_fee_wei: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Fees:
    """`block` is the newest block used; `base_fee_wei` is the next block's."""

    block: int
    base_fee_wei: int
    estimates: Mapping[Tier, Estimate]


def of_history(history: Any, *, floor_wei: int, block_time_s: float) -> Fees:
    """From a reply to eth_feeHistory. Raises ValueError if it is not valid."""
    try:
        base_fees = [int(fee, 16) for fee in history["baseFeePerGas"]]
        used = [float(ratio) for ratio in history["gasUsedRatio"]]
        rewards = [[int(tip, 16) for tip in block] for block in history.get("reward") or ()]
        newest = int(history["oldestBlock"], 16) + len(used) - 1
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError("no fee history") from exc
    if not used or len(base_fees) != len(used) + 1 or any(len(block) != len(PERCENTILES) for block in rewards):
        raise ValueError("no fee history")
    if not 0 <= newest < 2**63:
        raise ValueError("no number of a block")
    busy = [block for block, ratio in zip(rewards, used, strict=False) if ratio > 0]
    estimates: dict[Tier, Estimate] = {}
    for index, (tier, aim) in enumerate(AIMS.items()):
        tip = max(floor_wei, _median([block[index] for block in busy]))
        estimates[tier] = Estimate(_share(base_fees[-1], aim.base_percent) + tip, tip, _wait(aim, block_time_s))
    return Fees(newest, base_fees[-1], estimates)


def of_gas_price(price_wei: int, block: int, *, floor_wei: int, block_time_s: float) -> Fees:
    """Fees of a chain without a base fee: the whole price is the tip."""
    estimates: dict[Tier, Estimate] = {}
    for tier, aim in AIMS.items():
        price = max(floor_wei, _share(price_wei, aim.price_percent))
        estimates[tier] = Estimate(price, price, _wait(aim, block_time_s))
    return Fees(block, 0, estimates)


def gwei(wei: int) -> str:
    """The amount in gwei as text, exact."""
    return formatted(wei, GWEI_DECIMALS)


def wei_of(gwei_text: str) -> int:
    """An amount in gwei as whole wei, rounded down."""
    whole, _, part = gwei_text.partition(".")
    return int(whole + part[:GWEI_DECIMALS].ljust(GWEI_DECIMALS, "0"))


def _share(amount: int, percent: int) -> int:
    """Rounded half up."""
    return (amount * percent + 50) // 100


def _median(values: Sequence[int]) -> int:
    if not values:
        return 0
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def _wait(aim: TierTarget, block_time_s: float) -> int:
    return max(1, math.ceil(aim.blocks * Decimal(str(block_time_s))))
