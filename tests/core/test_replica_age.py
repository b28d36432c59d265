"""The age of a replica's data, by positions in the primary's log."""

from __future__ import annotations

import math

from proxy.core.replica_age import MOST_SAMPLES, ReplicaAge


def test_age_is_infinite_before_the_first_sample() -> None:
    assert ReplicaAge().seconds(5.0) == math.inf


def test_replica_that_has_everything_is_as_old_as_the_sample() -> None:
    age = ReplicaAge()
    age.sample(1.0, written=100, replayed=100)
    assert age.seconds(1.5) == 0.5


def test_lagging_replica_is_as_old_as_the_last_sample_that_it_has_replayed() -> None:
    age = ReplicaAge()
    for second in range(10):
        age.sample(float(second), written=100 * second, replayed=max(0, 100 * (second - 3)))
    assert age.seconds(9.0) == 3.0


def test_replica_that_lost_its_primary_grows_older() -> None:
    age = ReplicaAge()
    age.sample(0.0, written=100, replayed=100)
    for second in range(1, 2 * MOST_SAMPLES):
        age.sample(float(second), written=100 + second, replayed=100)
    assert age.seconds(2.0 * MOST_SAMPLES) == 2.0 * MOST_SAMPLES
    age.sample(200.0, written=500, replayed=500)
    assert age.seconds(200.0) == 0.0
