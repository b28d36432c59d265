"""Flights: an exception of one waiter reaches neither the others nor the connection."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import Fault, Unavailable
from proxy.services.rpc.flights import Flight, FlightHandler
from proxy.services.rpc.waiters import WholeResultWaiter
from tests.rpc_harness import rpc_harness
from tests.web.worker import on_uvloop


class RecordingWaiter(WholeResultWaiter):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_result(self, result: Any) -> None:
        self.received.append(result)

    def on_error(self, error: bytes) -> None:
        self.received.append(error)

    def on_fault(self, fault: Fault) -> None:
        self.received.append(fault)


class BrokenWaiter(RecordingWaiter):
    def on_result(self, result: Any) -> None:
        raise RuntimeError("broken")

    def on_error(self, error: bytes) -> None:
        raise RuntimeError("broken")

    def on_fault(self, fault: Fault) -> None:
        raise RuntimeError("broken")


@on_uvloop
async def test_broken_waiter_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with rpc_harness(1) as harness:
        policy = harness.route.policies["eth_getBalance"]
        flight, other = Flight(FlightHandler(), policy, b"[]", BrokenWaiter(), 0.0, 0, 0), RecordingWaiter()
        flight.waiters.append(other)
        fault = Unavailable("down")
        flight.deliver(b"1")
        flight.deliver_error(b"{}")
        flight.deliver_fault(fault)
        assert other.received == [b"1", b"{}", fault]
    assert [each.message for each in caplog.records].count("a reply was not delivered") == 3
