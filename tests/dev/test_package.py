"""The package, built and installed outside the checkout. Its dependencies come from the environment of the tests.

`make wheel-test` runs the same tests with the wheel that contains the compiled hot path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy import __version__
from proxy.data_files import CONFIG
from tests.guide_pages import PAGES, blocks_of
from tests.service import ROOT, end_with_the_tests, finished, until

SHIPPED = {"config": {".toml", ".json", ".mjs", ".cjs"}, "schemas": {".json", ".sql", ".mjs", ".py", ".go", ".ts"}}
# Sources of the contracts, whose artifacts are shipped, and a schema that only the tests compare with.
NOT_SHIPPED = ("config/devnet/contracts/", "schemas/sql/schema.sql")
# A wheel that was built before, for this platform.
COMPILED_WHEEL = os.environ.get("WHEEL_TEST", "")
needs_a_built_wheel = pytest.mark.skipif(not COMPILED_WHEEL, reason="make wheel-test runs it")


@dataclass
class Package:
    sdist: Path
    wheel: Path
    penstock: Path

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.penstock, *words], cwd=self.penstock.parent, env=dict(env or {}), capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    def launch(self, *words: str, cwd: Path, **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.penstock, *words],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(cwd), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_the_tests,
        )


def build(what: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel in a directory. A process of its own, because setuptools changes the process it runs in."""
    code = f"import sys; from setuptools.build_meta import build_{what} as build; print(build(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    room = tmp_path_factory.mktemp("package")
    source = room / "checkout"
    for name in tracked():
        is_part = not name.startswith(("tests/", "bench/")) or name == "bench/figures.md"  # which the guide includes
        if is_part and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    sdist = build("sdist", source, room)
    subprocess.run(["tar", "-xf", sdist], cwd=room, check=True)
    wheel = Path(COMPILED_WHEEL) if COMPILED_WHEEL else build("wheel", room / sdist.name.removesuffix(".tar.gz"), room)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", room / "venv"], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(room / "venv")}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(room / "venv" / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    return Package(sdist, wheel, room / "venv" / "bin" / "penstock")


def test_all_data_files_are_in_the_wheel(package: Package) -> None:
    expected = {
        f"proxy/data/{name}"
        for name in tracked()
        if Path(name).suffix in SHIPPED.get(name.split("/")[0], ()) and not name.startswith(NOT_SHIPPED)
    }
    expected |= {name for name in tracked() if name.startswith("proxy/")}
    expected |= {
        f"proxy/data/guide/{name}" for name in ("index.html", "quickstart/index.html", "search/search_index.json")
    }
    with zipfile.ZipFile(package.wheel) as wheel:
        assert expected - set(wheel.namelist()) == set()


def test_wheel_is_for_every_platform_unless_it_is_compiled(package: Package) -> None:
    with zipfile.ZipFile(package.wheel) as wheel:
        compiled = [name for name in wheel.namelist() if name.endswith(".so")]
    assert bool(compiled) is bool(COMPILED_WHEEL)
    assert package.wheel.name.endswith("-py3-none-any.whl") is not bool(COMPILED_WHEEL)


def test_version_and_faults_of_the_settings_are_printed(package: Package) -> None:
    assert package.run("--version").stdout == f"penstock {__version__}\n"
    done = package.run("check")
    assert done.returncode == 2
    assert done.stderr.count("penstock: ") == 2
    assert "usage: penstock" in package.run("--help").stdout


def test_start_without_npm_names_what_is_missing(package: Package, tmp_path: Path) -> None:
    done = package.run("dev", "--data", str(tmp_path), env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "needs Node 20 or newer with npm, which was not found on PATH" in done.stderr


def lend_npm_packages(package: Package, data: Path) -> None:
    """Link the packages of the checkout, as if a first start had installed them."""
    code = "from proxy.dev import npm_packages; print(npm_packages.installed_mark())"
    python = package.penstock.with_name("python")
    mark = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout.strip()
    for part in (".", "bundler"):
        (data / "devnet" / part).mkdir(parents=True)
        for file in (*(CONFIG / "devnet" / part).glob("*.?js"), CONFIG / "devnet" / part / "package.json"):
            shutil.copy(file, data / "devnet" / part)
        (data / "devnet" / part / "node_modules").symlink_to(CONFIG / "devnet" / part / "node_modules")
    (data / "devnet" / mark).touch()


async def block_number(base: str, key: str) -> str:
    call = {"jsonrpc": "2.0", "id": 1, "method": "eth_blockNumber", "params": []}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base}/rpc/dev/mainnet", json=call, headers={"X-API-Key": key}) as response,
    ):
        return str((await response.json())["result"])


async def guide_title(base: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(base.removesuffix("/v1") + "/docs/guide/") as response:
        return (await response.text()).partition("<title>")[2].partition("</title>")[0]


def documented(page: str, word: str) -> str:
    """The commands of the guide that contain a word."""
    [block] = [block.text for block in blocks_of(PAGES / page) if word in block.text]
    return block


def in_shell(commands: str, room: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start commands as a new user would: without variables of the tests' environment, except those for package indexes."""
    kept = {name: value for name, value in os.environ.items() if "CERT" in name or name.startswith(("PIP_", "NODE_"))}
    env = {"PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}", **kept, "HOME": str(room)}
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", "-euxc", commands], cwd=room, env=env, stdout=output, stderr=output, preexec_fn=end_with_the_tests
        )


@needs_a_built_wheel
@pytest.mark.timeout(600)
async def test_quickstart_runs_as_written(tmp_path: Path) -> None:
    """With Python's and npm's packages from the network, and the ready wheel for every platform."""
    [wheel] = Path(COMPILED_WHEEL).parent.glob("penstock-*-py3-none-any.whl")
    (room := tmp_path / "a new user").mkdir()
    shutil.copy(wheel, room)
    commands = documented("quickstart.md", "penstock dev").replace(
        "penstock dev", "exec penstock dev --port 0 --ready-file ready.json"
    )
    dev = in_shell(commands, room, log := tmp_path / "log")
    try:
        await until(lambda: (room / "ready.json").exists() or dev.poll() is not None, within_s=540.0)
        assert dev.poll() is None, log.read_text()
        ready = orjson.loads((room / "ready.json").read_bytes())
        assert int(await block_number(ready["base_url"], ready["keys"]["enterprise"]), 16) > 0
        assert "installing" in log.read_text()
    finally:
        dev.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(dev.wait, 60.0) == 0


@needs_a_built_wheel
@pytest.mark.timeout(600)
async def test_installation_for_production_runs_as_written(tmp_path: Path) -> None:
    commands = documented("production.md", "make wheel").replace("make wheel\n", "")
    (tmp_path / "dist").symlink_to(Path(COMPILED_WHEEL).parent)
    commands = commands.replace("/opt/penstock", f"{tmp_path}/penstock") + "\npenstock/bin/penstock --version"
    installing = in_shell(commands, tmp_path, log := tmp_path / "log")
    assert await asyncio.to_thread(installing.wait, 540.0) == 0, log.read_text()
    assert log.read_text().endswith(f"penstock {__version__}\n")


async def test_dev_and_serve_answer_calls(package: Package, tmp_path: Path) -> None:
    lend_npm_packages(package, tmp_path / "data")
    ready_file, config = tmp_path / "ready.json", tmp_path / "penstock.toml"
    words = ("--port", "0", "--data", "data", "--no-contracts", "--ready-file", str(ready_file))
    dev = package.launch("dev", *words, cwd=tmp_path)
    try:
        await until(lambda: ready_file.exists() or dev.poll() is not None, within_s=90.0)
        assert dev.poll() is None, dev.communicate()[0].decode()
        ready = orjson.loads(ready_file.read_bytes())
        key = ready["keys"]["enterprise"]
        assert await block_number(ready["base_url"], key) == "0x0"
        assert await guide_title(ready["base_url"]) == "Penstock"
        running = orjson.loads((tmp_path / "data" / "running.json").read_bytes())
        config.write_text(serve_settings(running))
        serve = package.launch("serve", "--config", str(config), cwd=tmp_path, DATABASE_URL=running["database"]["url"])
        try:
            said = await serving_line(serve)
            assert said["compiled"] is bool(COMPILED_WHEEL)
            assert await block_number(f"http://127.0.0.1:{said['port']}/v1", key) == "0x0"
        finally:
            serve.send_signal(signal.SIGTERM)
            assert (await finished(serve, within_s=40.0))[0] == 0
    finally:
        dev.send_signal(signal.SIGINT)
        assert (await finished(dev, within_s=40.0))[0] == 0


def serve_settings(running: Mapping[str, Any]) -> str:
    upstream = next(each for each in running["upstreams"] if each["network"] == "dev/mainnet")
    return f"""
[server]
port = 0
workers = 1
dev = true
[metrics]
port = 0
[follower]
networks = []
[keys]
pepper = "{running["keys"]["pepper"]}"
[[upstreams]]
network = "dev/mainnet"
url = "{upstream["url"]}"
"""


async def serving_line(serve: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The line of the log that says where the service can be reached."""
    assert serve.stdout is not None
    while line := await asyncio.to_thread(serve.stdout.readline):
        said: dict[str, Any] = orjson.loads(line) if line.startswith(b"{") else {}
        if said.get("message") == "serving":
            return said
    raise AssertionError("serve has ended")
