"""The commands of deploy/README.md for compose, run with Docker: from an empty directory to calls through both gateways."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.service import ROOT, until

DEPLOY = ROOT / "deploy"
GATEWAYS = (8545, 8546)
PROMETHEUS = "http://127.0.0.1:9090/api/v1"
GRAFANA = "http://127.0.0.1:3000/"
# A user without rights, who owns the settings.
USER = 1000

pytestmark = [
    pytest.mark.skipif("COMPOSE_TEST" not in os.environ, reason="make compose-test runs it"),
    pytest.mark.timeout(600),
]


def documented(title: str) -> str:
    """The commands of a section of deploy/README.md."""
    section = (DEPLOY / "README.md").read_text("utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    return textwrap.dedent(block)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the directory with the compose file."""
    return tmp_path_factory.mktemp("compose") / "deploy" / "compose"


@pytest.fixture(scope="module")
def output(here: Path) -> Iterator[str]:
    """The output of the commands."""
    room = here.parent.parent
    for part in ("compose", "grafana", "prometheus"):
        shutil.copytree(DEPLOY / part, room / "deploy" / part)
    for name in ("chain_stub.py", "compose.override.yaml"):
        shutil.copy(ROOT / "tests" / "compose" / name, here)
    for path in (room, *room.rglob("*")):
        os.chown(path, USER, USER)
    commands = documented("Compose").replace("ethereum/mainnet=https://…", "ethereum/sepolia=http://upstream:8545")
    commands = commands.replace("id -u", f"echo {USER}").replace("id -g", f"echo {USER}")
    try:
        done = subprocess.run(["bash", "-euxc", commands], cwd=room, capture_output=True, text=True, check=False)
        logs = "" if done.returncode == 0 else docker(here, "logs", "--tail", "40")
        assert done.returncode == 0, done.stdout + done.stderr + logs
        yield done.stdout
    finally:
        docker(here, "down", "--volumes", "--timeout", "60")


def docker(here: Path, *words: str) -> str:
    done = subprocess.run(["docker", "compose", *words], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


async def got(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json()


async def test_both_gateways_answer_a_call(output: str) -> None:
    key = max(re.findall(r"svc_\w+", output), key=len)
    call = {"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice", "params": []}

    async def result(port: int) -> Any:
        url = f"http://127.0.0.1:{port}/v1/rpc/ethereum/sepolia"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=call, headers={"X-API-Key": key}) as response,
        ):
            return orjson.loads(await response.read()).get("result")

    for port in GATEWAYS:
        await until(lambda port=port: result(port))
        assert await result(port) == "eth_gasPrice"


async def test_prometheus_reads_every_role_and_the_rules(output: str) -> None:
    async def targets() -> bool:
        found = (await got(f"{PROMETHEUS}/targets"))["data"]["activeTargets"]
        return [each["health"] for each in found] == ["up"] * 4

    await until(targets, within_s=120.0)
    assert (await got(f"{PROMETHEUS}/rules"))["data"]["groups"]


async def test_follower_knows_the_head(output: str) -> None:
    async def knows_head() -> bool:
        found = await got(f"{PROMETHEUS}/query?query=penstock_follower_head")
        return [each["value"][1] for each in found["data"]["result"]] == ["16"]

    await until(knows_head, within_s=120.0)


async def test_board_shows_traffic_upstreams_and_the_follower(output: str) -> None:
    """The stand-in for Grafana finds board and data source by the files of provisioning, and runs every query."""
    shown = ("penstock_calls_total", "penstock_upstream_up", "penstock_follower_head", "penstock_database_up")

    async def are_shown() -> bool:
        with_data = [query for query, outcome in (await got(GRAFANA)).items() if outcome == "data"]
        return all(any(metric in query for query in with_data) for metric in shown)

    await until(are_shown, within_s=120.0)


async def test_no_part_is_away(here: Path, output: str) -> None:
    async def are_whole() -> bool:
        found = [await got(f"http://127.0.0.1:{port}/readyz") for port in GATEWAYS]
        return found == [{"status": "ready", "degraded": []}] * len(GATEWAYS)

    await until(are_whole)
    assert "valkey refused" not in docker(here, "logs", "gateway")
