"""Contradicted replies: kept within bounds, listed for operators only, and exported as JSON lines."""

from __future__ import annotations

import time
from dataclasses import replace

import orjson
import pytest

from proxy.core.contradictions import MOST_REPLY, ContradictedReply, cut
from proxy.services.contradictions import MOST_WAITING, ContradictionLog
from proxy.store.postgres import contradictions
from proxy.store.postgres.contradictions import KEEP_DAYS, ContradictionStore
from tests.dashboard.service import DashboardService
from tests.dashboard.test_commands import run
from tests.shapes import conforms

FOUND = ContradictedReply(
    at=0.0,
    network="test/contradictions",
    method="eth_getBalance",
    params='["0x11","0x1"]',
    kind="outvoted",
    verified_by="quorum 2/3",
    upstream="test/contradictions#1",
    operator="a",
    reply='"0x66"',
    digest="66",
    others=(("test/contradictions#2", "b"), ("test/contradictions#3", "c")),
    other_reply='"0x1"',
    other_digest="01",
)


async def test_operators_see_both_replies_and_export_them(service: DashboardService) -> None:
    hostile = replace(
        FOUND, at=time.time() - 60, params="\0\ud800", reply="'; drop table contradictions; --", kind="split"
    )
    store = ContradictionStore(service.pool)
    await store.write([replace(FOUND, at=time.time()), hostile])
    operator = await service.operator()
    listed = conforms((await operator.get("/admin/contradictions")).data, "Contradictions")["contradictions"]
    first, second = [each for each in listed if each["network"] == FOUND.network]
    assert (first["reply"], first["other_reply"], first["kind"]) == (FOUND.reply, FOUND.other_reply, "outvoted")
    assert [each["operator"] for each in first["others"]] == ["b", "c"]
    assert (second["reply"], second["params"]) == (hostile.reply, "\N{REPLACEMENT CHARACTER}" * 2)
    (await (await service.holder()).get("/admin/contradictions")).fault(401)
    exported = (await run(service, "contradictions", "export", "--network", FOUND.network)).stdout.splitlines()
    assert [orjson.loads(line)["kind"] for line in exported] == ["outvoted", "split"]
    assert orjson.loads(exported[0])["other_reply"] == FOUND.other_reply
    shown = (await run(service, "contradictions", "list", "--since", "2020-01-01")).stdout
    assert FOUND.upstream in shown
    assert (await run(service, "contradictions", "export", "--network", "no/where")).stdout == ""


async def test_newest_of_each_network_are_kept_for_a_limited_time(
    service: DashboardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contradictions, "MOST_OF_NETWORK", 3)
    store, now = ContradictionStore(service.pool), time.time()
    old = replace(FOUND, network="test/old", at=now - (KEEP_DAYS + 1) * 86_400)
    await store.write([old, *[replace(FOUND, network="test/many", at=now + n, digest=str(n)) for n in range(5)]])
    await store.write([replace(FOUND, network="test/other", at=now)])
    kept = [
        [row["digest"] for row in await store.read(network=name, since=None, most=None)]
        for name in ("test/old", "test/many", "test/other")
    ]
    assert kept == [[], ["4", "3", "2"], [FOUND.digest]]


async def test_repetitions_are_dropped_and_few_wait(service: DashboardService) -> None:
    log = ContradictionLog(ContradictionStore(service.pool))
    for _ in range(3):
        log.note(replace(FOUND, network="test/repeated", at=time.time()))
    for number in range(2 * MOST_WAITING):
        log.note(replace(FOUND, network="test/repeated", at=time.time(), digest=str(number)))
    await log.flush()
    assert len(await log.read("test/repeated", None)) == MOST_WAITING
    await log.flush()


def test_long_replies_are_cut_between_characters() -> None:
    assert cut("\N{SNOWMAN}".encode() * MOST_REPLY * 2, MOST_REPLY) == "\N{SNOWMAN}" * MOST_REPLY
    assert cut(b"\xff", 10) == "\N{REPLACEMENT CHARACTER}"
