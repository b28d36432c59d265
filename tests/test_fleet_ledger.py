"""The ledger of a fleet whose parts are broken: figures of a run, and the chain against the events received."""

from __future__ import annotations

import asyncio

from bench.fleet.ledger import FleetLedger
from bench.fleet.traffic import FleetTraffic
from tests.chain_upstream import LittleChain


def test_ledger_counts_the_failures_during_each_break() -> None:
    ledger = FleetLedger(answered=10, in_flight=4)
    ledger.failures["503"] += 1
    first = ledger.begin("gateway1", 2.0)
    ledger.failures["503"] += 2
    ledger.end(first, 3.5)
    assert (first.recovered_s, first.failed, ledger.failed) == (1.5, 2, 3)
    assert ledger.is_clean
    ledger.begin("primary", 9.0)
    assert not ledger.is_clean
    assert ledger.lines() == [
        "calls       10 answered, 3 failed (503 3)",
        "events      0 expected, 0 lost, 0 invented",
        "writes      0 acknowledged, 0 of them lost, 0 refused",
        "heads       0 on a socket, 0 gaps, 0 repeated, 0 reconnects",
        "breaks      2",
        "  gateway     1 times, recovered in 1.5 s at most, writes again in 0.0 s at most, 2 calls failed of 4 in flight",
        "  primary     1 times, recovered in 0.0 s at most, writes again in 0.0 s at most, 0 calls failed of 4 in flight",
        "     2.0 s  gateway1     recovered in   1.5 s, 2 calls failed of 4 in flight",
        "     9.0 s  primary      did not recover, 0 calls failed of 4 in flight",
    ]


def test_lost_write_or_head_is_not_clean() -> None:
    assert FleetLedger().is_clean
    assert not FleetLedger(writes_lost=1).is_clean
    assert not FleetLedger(gaps=1).is_clean


def test_audit_finds_lost_and_invented_events() -> None:
    chain, ledger = LittleChain(), FleetLedger()
    traffic = FleetTraffic(chain, ledger, port=1, key="")
    traffic.first_block = 1
    chain.mine((), (), ())
    traffic.received = {block.hash: block.number for block in chain.blocks[1:3]} | {"0xother": 9}
    asyncio.run(traffic.settle(0.0))
    assert (ledger.expected, ledger.lost, ledger.invented) == (3, 1, 1)
