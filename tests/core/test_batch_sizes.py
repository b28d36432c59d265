"""How many calls one request to an upstream may contain, by client."""

from __future__ import annotations

from proxy.core import batch_sizes
from proxy.core.batch_sizes import LONGEST_SMALLER_S, SMALLER_S, BatchSizes


def test_refusal_halves_the_batches_of_its_client_only() -> None:
    sizes = BatchSizes(20)
    sizes.refresh(100.0)
    sizes.refused("one", 20, 100.0)
    assert (sizes.of("one"), sizes.of("other")) == (10, 20)
    sizes.refused("one", 10, 100.0)
    sizes.refused("one", 3, 100.0)
    sizes.refused("one", 1, 100.0)
    assert sizes.of("one") == 1


def test_larger_batches_are_tried_again_and_each_refusal_doubles_the_wait() -> None:
    sizes, now = BatchSizes(20), 0.0
    for round_ in range(10):
        sizes.refused("one", 20, now)
        wait = min(SMALLER_S * 2**round_, LONGEST_SMALLER_S)
        sizes.refresh(now + wait - 1.0)
        assert sizes.of("one") == 10
        now += wait
        sizes.refresh(now)
        assert sizes.of("one") == 20


def test_clients_are_bounded() -> None:
    sizes = BatchSizes(20)
    for n in range(batch_sizes.MAX_CLIENTS + 5):
        sizes.refused(str(n), 20, 0.0)
    assert sizes.of("4") == 20
    assert sizes.of("5") == sizes.of(str(batch_sizes.MAX_CLIENTS)) == 10
