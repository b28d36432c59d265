"""The image, started as its configuration says: as its user, on a read-only root, against a real Postgres, to a first call."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy import __version__
from tests.database import Server
from tests.flows import production
from tests.flows.upstream import Upstream
from tests.service import until

IMAGE = os.environ.get("IMAGE_TEST", "")
MAX_BYTES = 200_000_000
# Mounts for one container: an unwritable root, and what a container engine adds to it. They end with the process.
MOUNTS = """
set -e
mount --bind {root} {root}
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/tmp
mkdir -p {root}/tmp/sockets {root}/tmp/settings
mount --bind {sockets} {root}/tmp/sockets
mount --bind {settings} {root}/tmp/settings
mount -o remount,ro,bind {root}
exec chroot --userspec={user} {root} /usr/bin/env -i {words}
"""

pytestmark = pytest.mark.skipif(not IMAGE, reason="make image-test runs it")


@dataclass
class Container:
    root: str
    config: dict[str, Any]
    sockets: Path
    settings: Path

    def command(self, *words: str, **env: str) -> list[str]:
        own = [*self.config["Env"], *(f"{name}={value}" for name, value in env.items())]
        script = MOUNTS.format(
            root=self.root,
            sockets=self.sockets,
            settings=self.settings,
            user=self.config["User"],
            words=shlex.join([*own, *words]),
        )
        return ["unshare", "--mount", "--propagation", "private", "bash", "-c", script]

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words, **env), capture_output=True, text=True, check=False)

    def penstock(self, *words: str) -> Any:
        done = self.run(*self.config["Entrypoint"], *words, "--config", "/tmp/settings/penstock.toml")
        assert done.returncode == 0, done.stderr
        return done.stdout


def buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Container]:
    config = orjson.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    server.sockets.chmod(0o711)  # the image's user connects too
    (server.sockets / ".s.PGSQL.5432").chmod(0o777)
    (settings := tmp_path_factory.mktemp("settings")).chmod(0o755)
    name = buildah("from", "--pull-never", IMAGE)
    try:
        yield Container(buildah("mount", name), config, server.sockets, settings)
    finally:
        buildah("umount", name)
        buildah("rm", name)


@pytest.fixture
async def database_name(server: Server) -> AsyncIterator[str]:
    name = await server.create()
    yield name
    await server.drop(name)


def test_image_is_small() -> None:
    [listed] = orjson.loads(buildah("images", "--json", IMAGE))
    number, unit = listed["size"].split()
    assert float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit] < MAX_BYTES


def test_process_has_no_privileges_and_a_read_only_root(container: Container) -> None:
    assert container.run("id", "-u").stdout == "65532\n"
    assert "Read-only file system" in container.run("touch", "/opt/penstock/file").stderr
    assert container.run("find", "/", "-xdev", "-perm", "/022", "-type", "f").stdout == ""


def test_hot_path_is_compiled(container: Container) -> None:
    done = container.run("python", "-c", "import proxy; from proxy import compiled; print(compiled.in_use())")
    assert done.stdout == "True\n", done.stderr


def test_parts_list_is_inside(container: Container) -> None:
    listed = orjson.loads(container.run("cat", "/usr/share/penstock/sbom.cdx.json").stdout)
    assert (listed["bomFormat"], listed["metadata"]["component"]["version"]) == ("CycloneDX", __version__)
    parts = {each["purl"].partition("@")[0] for each in listed["components"]}
    assert {"pkg:pypi/aiohttp", "pkg:deb/debian/python3", "pkg:deb/debian/libc6"} <= parts
    assert not {"pkg:pypi/mypy", "pkg:pypi/pip", "pkg:deb/debian/gcc"} & parts


async def test_container_answers_a_call_and_is_healthy(
    container: Container, server: Server, database_name: str, upstream: Upstream
) -> None:
    url = server.url(database_name, sockets=Path("/tmp/sockets"))
    file = container.settings / "penstock.toml"
    file.write_text(production.settings_text(url, upstream.url).replace("[server]", '[server]\nhost = "127.0.0.1"'))
    begun = time.monotonic()
    container.penstock("migrate")
    account = orjson.loads(
        container.penstock(
            "accounts", "create", "--name", "a", "--email", "a@example.com", "--plan", "growth", "--json"
        )
    )
    words = ("keys", "create", "--account", account["id"], "--mode", "live", "--scope", "rpc:read", "--json")
    key = orjson.loads(container.penstock(*words))["key"]
    log_file = container.settings / "log"
    serve = [*container.config["Entrypoint"], "serve", "--config", "/tmp/settings/penstock.toml"]
    own = {"PENSTOCK_SERVER__HOST": "127.0.0.1", "PENSTOCK_METRICS__HOST": "127.0.0.1"}
    with log_file.open("wb") as log:
        process = subprocess.Popen(container.command(*serve, **own), stdout=log, stderr=log)
    running = production.Production(process, log_file, file, key=key)
    try:
        await production.ready(running)
        assert await first_call(running) == "eth_gasPrice"
        print(f"\nfrom migrate to the first reply: {time.monotonic() - begun:.1f} s")
        check = [word.replace("8545", str(running.port)) for word in container.config["Healthcheck"]["Test"][1:]]
        await until(lambda: container.run(*check).returncode == 0)
    finally:
        code = await production.stop(running)
    assert code == 0
    assert container.run(*check).returncode != 0


async def first_call(running: production.Production) -> str:
    call = {"jsonrpc": "2.0", "id": 1, "method": "eth_gasPrice", "params": []}
    url = f"http://127.0.0.1:{running.port}/v1/rpc/ethereum/sepolia"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=call, headers={"X-API-Key": running.key}) as response,
    ):
        return str((await response.json())["result"])
