"""How usage is counted, summed and read as quantiles."""

from __future__ import annotations

import pytest

from proxy.core import usage
from proxy.core.request_records import blame_of
from proxy.core.usage import (
    BUCKETS,
    LATENCY_S,
    OTHER,
    KeyTallies,
    Tally,
    TouchedTallies,
    UsageSums,
    gather,
    lines_of,
    outcome_of,
    quantile_ms,
)
from proxy.errors import InternalError, InvalidRequest, RateLimited, Unavailable, UpstreamTimeout


def counted(times: int, seconds: float = 0.001) -> Tally:
    tally = Tally("net", "method")
    for _ in range(times):
        tally.count("results", "", 2, seconds)
    return tally


def test_usage_of_a_key_is_gathered_once_and_added_to_the_total() -> None:
    touched: TouchedTallies = []
    whole = Tally("net", "method")
    one, other = KeyTallies("acct", "key_1", touched), KeyTallies("acct", "key_2", touched)
    for tallies, times in ((one, 3), (other, 5)):
        for _ in range(times):
            tallies[whole].count("results", "hit", 2, 0.001)
    found = {key: (tally.results, tally.units, tally.hits) for _, key, tally in gather(touched)}
    assert found == {"key_1": (3, 6, 3), "key_2": (5, 10, 5)}
    assert (whole.results, whole.units, sum(whole.buckets)) == (8, 16, 8)
    assert not one
    assert not touched
    assert gather(touched) == []


def test_usage_counted_after_gathering_is_gathered_the_next_time() -> None:
    touched: TouchedTallies = []
    whole = Tally("net", "method")
    tallies = KeyTallies("acct", "key", touched)
    for _ in range(3):
        tallies[whole].count("faults", "", 0, 1.0)
        assert [tally.faults for _, _, tally in gather(touched)] == [1]
    assert whole.faults == 3


def test_error_is_whatever_had_no_result() -> None:
    tally = counted(4)
    tally.count("errors", "", 1, 0.1)
    tally.count("faults", "", 0, 0.1)
    used = UsageSums()
    used.add(tally)
    assert (used.requests, used.errors, used.units) == (6, 2, 9)


def test_quantile_is_inside_the_bucket_that_holds_it() -> None:
    took = [0] * BUCKETS
    assert quantile_ms(took, 0.5) is None
    took[0] = 10
    assert quantile_ms(took, 0.5) == 0.225
    assert quantile_ms(took, 1.0) == 0.475
    took[5] = 90
    p50 = quantile_ms(took, 0.5)
    assert p50 is not None
    assert LATENCY_S[4] * 1000 < p50 < LATENCY_S[5] * 1000


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_all_quantiles_of_one_reply_are_the_same(bucket: int) -> None:
    took = [0] * BUCKETS
    took[bucket] = 1
    assert len({quantile_ms(took, share) for share in (0.01, 0.5, 0.99, 1.0)}) == 1


def test_quantile_of_what_took_longest_is_the_last_edge() -> None:
    took = [0] * (BUCKETS - 1) + [7]
    assert quantile_ms(took, 0.5) == LATENCY_S[-1] * 1000


def test_quantiles_never_fall_as_the_share_grows() -> None:
    took = [3, 0, 5, 1, 0, 0, 9, 2, 0, 0, 0, 4, 0, 0, 1]
    found = [quantile_ms(took, share / 100) for share in range(1, 101)]
    assert found == sorted(found, key=lambda each: each or 0)


def test_step_follows_from_the_span() -> None:
    hour = 3600
    assert [usage.step_of(hours * hour) for hours in (1, 3, 4, 24, 192, 193)] == [
        "minute", "minute", "hour", "hour", "hour", "day",
    ]  # fmt: skip


def test_chart_has_every_step_of_its_span() -> None:
    assert usage.times_of(3661, 7400, "minute")[:2] == [3660, 3720]
    assert usage.times_of(0, 3 * 86_400, "day") == [0, 86_400, 172_800]
    assert usage.times_of(7200, 7200, "hour") == []


def test_lines_are_in_the_order_of_their_requests_and_all_others_come_last() -> None:
    points = [
        (name, at, UsageSums(requests=n, units=1)) for n, name in ((1, "a"), (5, "b"), (9, None)) for at in (0, 60)
    ]
    found = lines_of(points)
    assert [(line.name, line.total.requests) for line in found] == [("b", 10), ("a", 2), (OTHER, 18)]
    assert {at: used.requests for at, used in found[2].points.items()} == {0: 9, 60: 9}
    assert lines_of([]) == []


def test_faults_count_for_those_who_caused_them() -> None:
    tally = Tally("n", "m")
    faults = (
        InvalidRequest("wrong"),
        RateLimited("too fast", retry_after_s=1),
        Unavailable("no upstream", reason="upstream"),
        UpstreamTimeout("late"),
        Unavailable("the database is away"),
        InternalError("a bug"),
    )
    for fault in faults:
        tally.count(outcome_of(fault), "", 0, 0.1)
    assert (tally.errors, tally.faults, tally.upstream_faults) == (2, 4, 2)
    causes = [blame_of(outcome_of(fault), fault.status) for fault in faults]
    assert causes == ["client", "limit", "upstream", "upstream", "service", "service"]
    assert blame_of("errors", 200) == "chain"
    sums = UsageSums()
    sums.add(tally)
    assert (sums.requests, sums.errors, sums.faults, sums.upstream_faults) == (6, 6, 4, 2)
