"""The promotion of an upstream from its trial to its full share of calls, step by step.

An operator begins it, and each further step follows from the trial, which starts again with each step: the share rises while
replies agree and are fast, goes back a step while they fail or are slow, and ends if one differs.

One client can choose reads that few upstreams answer. So reads of a single account that fail do not count while those of others
succeed. Reads that differ do: a wrong reply is worse than a late promotion. The reason names the account, and the setting
`trial_without` leaves its reads out.
"""

from __future__ import annotations

from typing import Final

from proxy.core.trials import MOST_BEHIND, Trial
from proxy.core.usage import quantile_ms

# The parts of calls that may be sent to the upstream, one after the other.
STEPS: Final = (0.01, 0.05, 0.25, 1.0)
# Reads of a step that are compared before the next one, and before a share is lowered because they are slow or fail.
ENOUGH_READS, FEW_READS = 200, 50
# More failed reads than this share lower it.
MOST_FAILED: Final = 0.02
# It is slow if its median is above this factor of the median of the upstreams in use, and by more than this.
SLOW, SLOW_MS = 1.5, 5.0


def next_share(share: float, trial: Trial) -> tuple[float, str] | None:
    """The share that follows, and why; None if it stays. `trial`: the reads since the last step."""
    total = trial.total
    reads, outcomes = total.reads, total.outcomes
    if share <= 0.0:
        return None  # An operator has to promote it, again.
    if outcomes["different"]:
        culprit = trial.culprit("different")
        whose = f", all of account {culprit}" if culprit else ""
        return 0.0, f"{outcomes['different']:,} of {reads:,} reads differ{whose}"
    if missing := trial.blamable("missing"):
        return 0.0, f"it lacks methods of {missing:,} of {reads:,} reads"
    if reads < FEW_READS:
        return None
    if (failed := trial.blamable("error")) > MOST_FAILED * reads:
        return _lower(share), f"{failed:,} of {reads:,} reads failed"
    if (behind := trial.blamable("behind")) > MOST_BEHIND * reads:
        return _lower(share), f"it was behind in {behind:,} of {reads:,} reads"
    ours, theirs = quantile_ms(total.ours, 0.5) or 0.0, quantile_ms(total.theirs, 0.5) or 0.0
    if theirs > SLOW * ours and theirs > ours + SLOW_MS:
        return _lower(share), f"its median is {theirs:.3g} ms, and {ours:.3g} ms elsewhere"
    if reads < ENOUGH_READS or share >= STEPS[-1]:
        return None
    return min(step for step in STEPS if step > share), f"{reads:,} reads agree"


def _lower(share: float) -> float:
    return max((step for step in STEPS if step < share), default=0.0)
