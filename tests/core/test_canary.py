"""The steps by which an upstream is promoted."""

from __future__ import annotations

import pytest

from proxy.core.canary import ENOUGH_READS, FEW_READS, next_share
from proxy.core.routing import UpstreamGroup
from proxy.core.trials import Trial, TrialOutcome, TrialRead, trials_of
from proxy.core.upstream_health import UpstreamHealth


def trial(*reads: tuple[int, TrialOutcome], ours_s: float = 0.02, theirs_s: float = 0.02) -> Trial:
    found = Trial("a#new", 0.05)
    for count, outcome in reads:
        for _ in range(count):
            found.read("eth_call", TrialRead(outcome, ours_s, theirs_s))
    return found


@pytest.mark.parametrize(
    ("share", "tried", "after"),
    [
        (0.01, trial((ENOUGH_READS, "same")), 0.05),
        (0.05, trial((ENOUGH_READS, "same")), 0.25),
        (0.25, trial((ENOUGH_READS, "same")), 1.0),
        (1.0, trial((ENOUGH_READS, "same")), None),
        (0.05, trial((ENOUGH_READS - 1, "same")), None),
        (0.0, trial((ENOUGH_READS, "same")), None),
        (1.0, trial((ENOUGH_READS, "same"), (1, "different")), 0.0),
        (0.01, trial((1, "different")), 0.0),
        (0.25, trial((ENOUGH_READS, "same"), (1, "missing")), 0.0),
        (0.25, trial((ENOUGH_READS, "same"), (20, "error")), 0.05),
        (0.05, trial((ENOUGH_READS, "same"), (20, "behind")), 0.01),
        (0.01, trial((ENOUGH_READS, "same"), (20, "error")), 0.0),
        (0.05, trial((FEW_READS - 2, "same"), (1, "error")), None),
        (0.25, trial((FEW_READS, "same"), theirs_s=0.08), 0.05),
        (0.05, trial((ENOUGH_READS, "same"), theirs_s=0.005), 0.25),
    ],
)
def test_share_rises_while_replies_agree_and_are_fast(share: float, tried: Trial, after: float | None) -> None:
    found = next_share(share, tried)
    assert (None if found is None else found[0]) == after
    assert found is None or found[1]


def test_only_trials_at_the_present_share_are_counted() -> None:
    views = [
        {"networks": [{"trials": [trial((3, "same")).as_data]}]},
        {"networks": [{"trials": [Trial("a#new").as_data]}]},
    ]
    (found,) = trials_of(views, {"a#new": 0.05})
    assert (found.total.reads, found.share) == (3, 0.05)
    assert trials_of(views, {"a#new": 0.25}) == []


def group_of(share: float) -> tuple[UpstreamGroup, UpstreamHealth]:
    usual, canary = UpstreamHealth("a#1"), UpstreamHealth("a#new", index=1, share=0.0)
    canary.latency_s = 0.001  # It would get most calls.
    found = UpstreamGroup([usual, canary])
    canary.promoted(share, 1.0)
    return found, canary


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.01, 1, 10), (0.25, 50, 250), (1.0, 500, 1000)])
def test_canary_gets_at_most_its_share_of_calls(share: float, least: int, most: int) -> None:
    found, canary = group_of(share)
    chosen = sum(found.choose(1.0, "eth_call") is canary for _ in range(1000))
    assert least <= chosen <= most


def test_canary_takes_calls_that_no_other_upstream_takes_but_not_on_trial() -> None:
    found, canary = group_of(0.01)
    found.members[0].cordon(cordoned=True, now=1.0)
    assert [found.choose(1.0, "eth_call") for _ in range(10)] == [canary] * 10
    canary.promoted(0.0, 1.0)
    assert found.choose(1.0, "eth_call") is None
    assert canary.takes_trials(1.0)
    canary.cordon(cordoned=True, now=1.0)
    assert not canary.takes_trials(1.0)


def test_reads_of_one_account_that_fail_do_not_lower_the_share_while_those_of_others_succeed() -> None:
    outcomes: tuple[TrialOutcome, ...] = ("error", "missing", "behind")
    for outcome in outcomes:
        found = trial((FEW_READS, "same"))
        for _ in range(40):
            found.read("eth_call", TrialRead(outcome, 0.02, 0.02, account="acct_hostile"))
        assert next_share(0.25, found) is None
        for _ in range(10):
            found.read("eth_call", TrialRead(outcome, 0.02, 0.02, account="acct_other"))
        lowered = next_share(0.25, found)
        assert lowered is not None
        assert lowered[0] < 0.25


def test_reads_of_a_single_account_count_if_there_are_no_others() -> None:
    found = Trial("a#new", 0.05)
    for outcome in (*["same"] * 60, *["error"] * 10):
        found.read("eth_call", TrialRead(outcome, 0.02, 0.02, account="acct_only"))  # type: ignore[arg-type]
    assert next_share(0.25, found) == (0.05, "10 of 70 reads failed")
    assert found.culprit("error") == ""


def test_a_difference_ends_it_and_names_the_account() -> None:
    found = trial((FEW_READS, "same"))
    found.read("eth_call", TrialRead("different", 0.02, 0.02, account="acct_one"))
    assert next_share(0.25, found) == (0.0, "1 of 51 reads differ, all of account acct_one")


def test_accounts_are_summed_up_over_workers() -> None:
    found, other = trial((FEW_READS, "same")), Trial("a#new", 0.05)
    other.read("eth_call", TrialRead("error", 0.02, 0.02, account="acct_one"))
    found.add(other.as_data)
    assert found.culprit("error") == "acct_one"
    assert found.blamable("error") == 0
