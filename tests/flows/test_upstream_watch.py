"""Operators see each upstream in the metrics, and each change of its state in the log."""

from __future__ import annotations

import logging
import time

import pytest
from prometheus_client import REGISTRY

from proxy.core.fleet import REASONS, STATES
from proxy.services.fleet import UpstreamWatch
from tests.rpc_harness import rpc_harness
from tests.web.worker import on_uvloop


def gauge(name: str, upstream: str) -> float | None:
    return REGISTRY.get_sample_value(f"penstock_upstream_{name}", {"upstream": upstream})


@on_uvloop
async def test_state_of_each_upstream_is_measured_and_its_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.fleet"):
        async with rpc_harness(2) as harness:
            watch = UpstreamWatch((harness.worker.app.networks,))
            one, two = (upstream.health for upstream in harness.route.upstreams)
            watch.observe()
            assert [gauge("up", each.label) for each in (one, two)] == [1, 1]
            caplog.clear()
            watch.observe()
            assert not caplog.records
            one.open(time.monotonic())
            two.inflight, two.head = 3, two.head - 7
            watch.observe()
            assert [gauge("up", each.label) for each in (one, two)] == [0, 1]
            assert [gauge("breaker_open", each.label) for each in (one, two)] == [1, 0]
            assert [gauge("blocks_behind", each.label) for each in (one, two)] == [0, 7]
            assert gauge("calls_in_flight", two.label) == 3
            two.inflight = 0
        [line] = caplog.records
        assert line.message == "upstream state changed"
        assert vars(line).items() >= {"upstream": one.label, "state": "open", "before": "up"}.items()
        assert vars(line)["reason"] == "too many calls failed"
        assert REASONS.keys() == set(STATES)
