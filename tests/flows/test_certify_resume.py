"""`upstreams certify --resume FILE` goes on where a killed process was, and counts each read once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import orjson
import pytest
from aiohttp import web

from proxy.__main__ import main
from proxy.commands.capture_file import CapturedCall, write_capture
from proxy.commands.certify_progress import SAVE_S
from tests.rpc_upstreams import Chain, Refused, ScriptedUpstream, value_of
from tests.service import ROOT, until

CONFIG = """
database.url = "postgresql://nobody@127.0.0.1:1/nothing"
keys.pepper = "a pepper that no attacker can guess"
[[upstreams]]
network = "ethereum/mainnet"
url = "{url}"
name = "old"
"""
READS = 240
# Each reply takes this long, so that the process can be killed in between.
REPLY_S = 0.01
METHOD = "eth_getBalance"


class SlowUpstream(ScriptedUpstream):
    async def _reply(self, call: dict[str, object]) -> dict[str, object]:
        await asyncio.sleep(REPLY_S)
        return await super()._reply(call)


@asynccontextmanager
async def pair(room: Path) -> AsyncIterator[tuple[ScriptedUpstream, list[str]]]:
    """The candidate, and the words of the command that compares it by captured calls."""
    chain = Chain()
    present, candidate = SlowUpstream(chain), SlowUpstream(chain)
    for each in (present, candidate):
        await each.open()
    (room / "penstock.toml").write_text(CONFIG.format(url=present.url))
    calls = [
        CapturedCall(
            float(number), "ethereum/mainnet", METHOD, msgspec.Raw(orjson.dumps([f"0x{number + 1:040x}", "0x1"]))
        )
        for number in range(READS)
    ]
    write_capture(room / "calls", "2026-11-18T12:00:00.000+00:00", calls)
    words = ["upstreams", "certify", candidate.url, "--calls", str(room / "calls"), "--reads", str(READS), "--json"]
    try:
        yield candidate, [*words, "--resume", str(room / "kept"), "--config", str(room / "penstock.toml")]
    finally:
        for each in (present, candidate):
            await each.close()


def reads_of(candidate: ScriptedUpstream) -> list[str]:
    """The addresses of the reads that it got. The search for its oldest blocks asks for the balance of address 0."""
    return [call.params[0] for call in candidate.calls if call.method == METHOD and int(call.params[0], 16)]


async def start(words: list[str]) -> asyncio.subprocess.Process:
    env = {**os.environ, "PENSTOCK_SOURCE": "1"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *words), cwd=ROOT, env=env, stdout=asyncio.subprocess.PIPE
    )


async def test_killed_comparison_goes_on_where_it_was_and_counts_each_read_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (candidate, words):
        for _ in range(2):
            kept = (tmp_path / "kept").read_bytes() if (tmp_path / "kept").exists() else b""
            process = await start(words)
            await until(lambda kept=kept: (tmp_path / "kept").exists() and (tmp_path / "kept").read_bytes() != kept)
            await asyncio.sleep(SAVE_S / 2)
            process.kill()
            await process.communicate()
        saved = orjson.loads((tmp_path / "kept").read_bytes())
        assert 0 < saved["reads"] < READS
        process = await start(words)
        printed, _ = await process.communicate()
        report = orjson.loads(printed)
        (total,) = [row for row in report["methods"] if row["method"] == "all"]
        assert (total["reads"], total["same"]) == (READS, READS)
        # Each kill loses the reads since the last save, and those alone are made again.
        asked = reads_of(candidate)
        assert len({*asked}) == READS
        assert READS <= len(asked) <= READS + 2 * (2 * SAVE_S / REPLY_S)
        # A whole comparison is reported again without a read.
        process = await start(words)
        assert orjson.loads((await process.communicate())[0]) == report
        assert reads_of(candidate) == asked
        assert candidate.url not in (tmp_path / "kept").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a file of"),
        ("[" * 100_000, "is not a file of"),
        ('{"penstock_certify":2}', "is not a file of"),
        ('{"penstock_certify":1,"of":{"network":"x","against":"","candidate":"","calls":""}}', "of another comparison"),
        (
            '{"penstock_certify":1,"of":{"network":"x","against":"","candidate":"","calls":""},"methods":{"a":{"ours":[1]}}}',
            "is not a file of",
        ),
        (
            '{"penstock_certify":1,"of":{"network":"x","against":"","candidate":"","calls":""},"reads":-1}',
            "is not a file of",
        ),
    ],
)
async def test_other_file_is_not_continued(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with pair(tmp_path) as (candidate, words):
        (tmp_path / "kept").write_text(text)
        assert await asyncio.to_thread(main, words) == 2
        assert message in capsys.readouterr().err
        assert (tmp_path / "kept").read_text() == text
        assert not reads_of(candidate)


async def test_reads_of_old_blocks_cost_what_the_provider_bills_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with pair(tmp_path) as (_, words):
        await asyncio.to_thread(main, [*words, "--cost", "chainstack", "--price", "10"])
    (total,) = [row for row in orjson.loads(capsys.readouterr().out)["methods"] if row["method"] == "all"]
    # Two credits each, at ten dollars a million.
    assert total["their_usd"] == f"{READS * 2 * 10 / 1_000_000:.6f}"


class LimitedUpstream(ScriptedUpstream):
    """Takes so many requests a second, and keeps the state of its newest blocks only."""

    per_second = 35
    kept = 128

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self._times: list[float] = []
        self.answers["eth_getBalance"] = self._balance

    def _balance(self, params: list[object]) -> str:
        number = self._number(params[1])
        if number <= self.head - self.kept:
            raise Refused(-32000, "missing trie node")
        return value_of("balance", number)

    async def _answer(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        self._times = [at for at in self._times if at > now - 1.0]
        if len(self._times) >= self.per_second and b"eth_blockNumber" in await request.read():
            return web.Response(status=429, text="slow down")
        self._times.append(now)
        return await super()._answer(request)


async def test_report_has_the_bounds_the_rate_and_the_cost_of_the_candidate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with pair(tmp_path) as (old, words):
        candidate = LimitedUpstream(old.chain)
        await candidate.open()
        try:
            words[2] = candidate.url
            more = [
                "--rate",
                "80",
                "--cost",
                "alchemy",
                "--price",
                "0.40",
                "--reads",
                "3",
                "--html",
                str(tmp_path / "page"),
            ]
            assert await asyncio.to_thread(main, [*words, *more]) == 1, "too few reads"
        finally:
            await candidate.close()
        report = orjson.loads(capsys.readouterr().out)
        assert "state=-128" in report["oldest_blocks"]
        assert report["rate"] == "takes 20 calls a second, and refuses some of 40 with a 429"
        (total,) = [row for row in report["methods"] if row["method"] == "all"]
        assert (total["usd"], total["their_usd"]) == ("0.000000", "0.000024")
        assert "refuses some of 40" in (tmp_path / "page").read_text()
        assert await asyncio.to_thread(main, [*words, "--cost", "nobody"]) != 0
        assert "there is no price list 'nobody'; there are: alchemy" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*words, "--price", "0.40"]) != 0
        assert "--price needs --cost" in capsys.readouterr().err
