"""The guide's commands for containers and for compose, run with Docker: from an empty directory to a first call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy import __version__
from tests.guide_pages import PAGES, blocks_of
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


def documented(word: str) -> str:
    """The commands of the guide that contain a word, for the network of the stub, and run as a user without rights."""
    [block] = [block.text for block in blocks_of(PAGES / "production.md") if word in block.text]
    for text, other in {
        "ethereum/mainnet": "ethereum/sepolia",
        "--mode live": "--mode test",
        "id -u": f"echo {USER}",
        "id -g": f"echo {USER}",
    }.items():
        block = block.replace(text, other)
    return block


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
    try:
        done = run(documented("docker compose up"), room, UPSTREAM_URL="http://upstream:8545")
        logs = "" if done.returncode == 0 else docker(here, "logs", "--tail", "40")
        assert done.returncode == 0, done.stdout + done.stderr + logs
        yield done.stdout
    finally:
        docker(here, "down", "--volumes", "--timeout", "60")


def run(commands: str, room: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euxc", commands], cwd=room, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


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


# One container


def engine(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def away(output: str) -> Iterator[dict[str, str]]:
    """Postgres and an upstream on other hosts: the variables of the guide."""
    password = {"POSTGRES_USER": "penstock", "POSTGRES_DB": "penstock", "POSTGRES_PASSWORD": "secret"}
    given = [word for name, value in password.items() for word in ("--env", f"{name}={value}")]
    stub = ROOT / "tests" / "compose" / "chain_stub.py"
    image = f"localhost/penstock:{__version__}"
    names = [
        engine("run", "--detach", *given, "localhost/stand-in-postgres", "postgres"),
        engine("run", "--detach", "--volume", f"{stub}:/stub.py:ro", "--entrypoint", "python", image, "/stub.py"),
    ]
    database, upstream = (engine("inspect", "--format", "{{.NetworkSettings.IPAddress}}", name) for name in names)
    ready = f"until docker exec {names[0]} pg_isready --host 127.0.0.1 --username penstock; do sleep 0.2; done"
    subprocess.run(["bash", "-c", ready], check=True, capture_output=True, timeout=120)
    yield {
        "DATABASE_URL": f"postgresql://penstock:secret@{database}/penstock",
        "UPSTREAM_URL": f"http://{upstream}:8545",
    }
    engine("rm", "--force", "--volumes", *names)


@pytest.fixture(scope="module")
def container(away: dict[str, str], here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The output of the commands that start one container. Its port is that of a gateway of compose, which stops first."""
    docker(here, "stop", "gateway")
    room = tmp_path_factory.mktemp("container")
    os.chown(room, USER, USER)
    done = run(documented("--name penstock "), room, **away)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield done.stdout
    finally:
        subprocess.run(["docker", "rm", "--force", "penstock"], capture_output=True, check=False)


async def test_container_answers_a_call_and_becomes_healthy(container: str) -> None:
    assert '"result":"eth_gasPrice"' in container.replace(" ", "")
    await until(lambda: engine("inspect", "--format", "{{.State.Health.Status}}", "penstock") == "healthy", within_s=60)


def test_container_has_no_privileges_and_ends_in_time(container: str) -> None:
    assert engine("exec", "penstock", "id", "-u") == str(USER)
    refused = subprocess.run(["docker", "exec", "penstock", "touch", "/file"], capture_output=True, check=False)
    assert b"Read-only file system" in refused.stderr
    assert "CycloneDX" in engine("exec", "penstock", "cat", "/usr/share/penstock/sbom.cdx.json")
    engine("stop", "--time", "40", "penstock")
    assert engine("inspect", "--format", "{{.State.ExitCode}}", "penstock") == "0"
