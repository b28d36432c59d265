"""`penstock upstreams test` on networks of every family: what it shows of a good upstream, and the problem of each bad one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy import settings
from proxy.chains.families import family_of
from proxy.commands.connections import is_useful, tried_upstreams
from tests.beacon_stub import beacon_stub
from tests.families_harness import CASES
from tests.node_stubs import NodeStub, running_stub
from tests.rest_stubs import RestStub
from tests.shipped_tables import TABLES

KINDS = sorted(CASES)
BATCHES = {each.id: family_of(each).batches for each in TABLES.chains.networks()}


@asynccontextmanager
async def refusing(status: int, body: str) -> AsyncIterator[str]:
    """The URL of a server with one reply to everything."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    runner = web.ServerRunner(web.Server(answer))  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def rows_of(directory: Path, network: str, urls: Sequence[str]) -> list[dict[str, Any]]:
    text = '[database]\nurl = "postgresql://nowhere/none"\n'
    text += "".join(f'[[upstreams]]\nnetwork = "{network}"\nurl = "{url}"\n' for url in urls)
    (directory / "penstock.toml").write_text(text)
    found = settings.load(directory / "penstock.toml", environ={"PENSTOCK_KEYS__PEPPER": "p" * 32})
    return await tried_upstreams(found, TABLES)


@pytest.mark.parametrize("kind", KINDS)
async def test_problem_of_each_upstream_is_named(kind: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        good, foreign = CASES[kind].stub(), CASES[kind].stub()
        foreign.chain = {"starknet": "0x7", "aptos": "7"}.get(kind, "another")
        other: NodeStub = CASES["near" if isinstance(good, RestStub) else "aptos"].stub()
        for each in (good, foreign, other):
            await stack.enter_async_context(running_stub(each))
        locked = await stack.enter_async_context(refusing(401, "no"))
        web_page = await stack.enter_async_context(refusing(200, "<html>welcome</html>"))
        urls = [good.url, foreign.url, other.url, locked, web_page]
        first, *bad = await rows_of(tmp_path, good.network, urls)
    assert (first["state"], first["problem"], first["head"], first["behind"]) == ("up", "", good.head, 0), first
    assert first["batches"] == ("yes" if BATCHES[good.network] else None)
    assert not any(map(is_useful, bad)), bad
    problems = [each["problem"] for each in bad]
    assert " and " + good.network in problems[0], problems
    # A node of another family: its reply depends on how its server treats what it does not know.
    assert problems[1]
    assert "names no chain" in problems[1] or "its reply to" in problems[1] or "it refuses the call" in problems[1]
    assert problems[2] == "it refuses the credentials in the URL, or their lack (HTTP status 401)"
    assert re.fullmatch(r"its reply to [A-Za-z0-9_ /]+ is not JSON(-RPC \(HTTP status 200\))?", problems[3]), problems


async def test_route_that_an_upstream_lacks_is_named_with_its_status(tmp_path: Path) -> None:
    async with beacon_stub() as good, refusing(404, '{"message": "no such route"}') as lacking:
        rows = await rows_of(tmp_path, "ethereum-beacon/mainnet", [good.url, lacking])
    assert [each["state"] for each in rows] == ["up", "silent"]
    assert rows[1]["problem"] == "its reply to GET /eth/v1/beacon/genesis has the HTTP status 404"
    assert rows[0]["batches"] is None
