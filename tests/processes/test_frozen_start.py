"""Garbage collections of a running process do not visit what its start has made."""

from __future__ import annotations

import gc

from proxy.processes.worker import freeze_start


def test_full_collection_visits_nothing_of_the_start() -> None:
    made = [[number] for number in range(100)]
    threshold = gc.get_threshold()
    freeze_start()
    try:
        assert gc.get_freeze_count() > len(made)
        assert not [each for each in gc.get_objects() if each is made]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
