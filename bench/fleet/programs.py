"""The programs of the fleet as child processes, with their settings."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from proxy.dev.child import Child, Program, inherited_environment
from proxy.errors import StartError

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "dev/mainnet"
PEPPER = "pepper-of-a-fleet-on-one-machine"
SENTINEL_NAME = "penstock"
# Debian's directory of programs for administrators.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
PORTS = range(10_000, 28_000)
# How long a part may take to start: all start at once, on one machine.
START_S = 120.0
# A gateway is out of the balancer before it stops: the balancer checks every second, and believes the second failure.
LEAVE_S = 3.0


def program(*names: str) -> str:
    """The path of the first of these programs that is installed."""
    for name in names:
        if (found := shutil.which(name, path=_PATH)) is not None:
            return found
    raise StartError([f"none of {', '.join(names)} is installed: apt-get install {names[-1]}"])


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel hands out: no other program gets one before its part has started."""
    found = list(itertools.islice(filter(_is_free, random.sample(PORTS, 20 * count)), count))
    if len(found) < count:
        raise StartError([f"fewer than {count} ports between {PORTS.start} and {PORTS.stop} are free"])
    return found


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class FleetPart:
    """One program. It can be killed, and then starts again."""

    def __init__(self, name: str, kind: str, argv: tuple[str, ...], home: Path, port: int) -> None:
        self.name = name
        self.kind = kind
        self.port = port
        self.is_ready: Callable[[], Awaitable[bool]] = self.answers
        self.child = Child(
            Program(
                name=name,
                argv=argv,
                env=inherited_environment(),
                is_ready=lambda: self.is_ready(),
                ready_within_s=START_S,
                stop_signal=signal.SIGTERM,
                log_file=home / f"{name}.log",
            )
        )

    def __repr__(self) -> str:
        return f"<FleetPart {self.name} {'up' if self.runs else 'down'}>"

    @property
    def pid(self) -> int:
        return self.child.process.pid if self.child.process is not None else 0

    @property
    def runs(self) -> bool:
        return self.child.process is not None and self.child.process.returncode is None

    async def kill(self) -> None:
        process = self.child.process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def answers(self) -> bool:
        """Whether the port accepts connections."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def serves(self, path: str = "/readyz") -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=2.0)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://127.0.0.1:{self.port}{path}") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def service(home: Path, kind: str, place: int, *, port: int, metrics_port: int) -> FleetPart:
    """A gateway, follower or deliverer. All share one settings file; the ports differ."""
    name = f"{kind}{place}"
    config = home / f"{name}.toml"
    own = (
        f"[server]\nport = {port}\nworkers = 1\ndrain_s = 10.0\nleave_s = {LEAVE_S}\n[metrics]\nport = {metrics_port}\n"
    )
    config.write_text(own + (home / "shared.toml").read_text())
    argv = (sys.executable, "-m", "proxy", "serve", "--config", str(config), "--role", kind)
    part = FleetPart(name, kind, argv, home, port if kind == "gateway" else metrics_port)
    part.is_ready = part.serves if kind == "gateway" else lambda: part.serves("/metrics")
    return part


def shared_settings(*, database: str, sentinel: int, upstream: str) -> str:
    return f"""
[database]
url = "{database}"
[keys]
pepper = "{PEPPER}"
[valkey]
limits_url = "valkey://127.0.0.1:{sentinel}/0?sentinel={SENTINEL_NAME}"
[egress]
allow = ["127.0.0.0/8"]
http = true
ports = []
[follower.start]
"{NETWORK}" = 0
[webhooks]
timeout_s = 2.0
[[upstreams]]
network = "{NETWORK}"
url = "{upstream}"
"""


def balancer(home: Path, port: int, gateways: list[FleetPart]) -> FleetPart:
    """HAProxy with the configuration of `deploy/`."""
    text = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text()
    text = text.replace("bind :8545", f"bind 127.0.0.1:{port}").replace("maxconn 20000", "maxconn 1000")
    text = re.sub(r"^    server .*\n", "", text, flags=re.MULTILINE)
    text += "".join(f"    server {each.name} 127.0.0.1:{each.port} check\n" for each in gateways)
    (config := home / "haproxy.cfg").write_text(text)
    return FleetPart("haproxy", "balancer", (program("haproxy"), "-db", "-f", str(config)), home, port)


def valkeys(home: Path, ports: list[int]) -> list[FleetPart]:
    """A primary, its replica, and the Sentinel that promotes the replica."""
    server = program("valkey-server", "redis-server")
    first, second, watch = ports
    common = ("--bind", "127.0.0.1", "--save", "", "--maxmemory-policy", "noeviction", "--dir", str(home))
    (config := home / "sentinel.conf").write_text(
        f"port {watch}\nbind 127.0.0.1\ndir {home}\nsentinel monitor {SENTINEL_NAME} 127.0.0.1 {first} 1\n"
        f"sentinel down-after-milliseconds {SENTINEL_NAME} 1000\nsentinel failover-timeout {SENTINEL_NAME} 5000\n"
    )
    replica = ("--replicaof", "127.0.0.1", str(first))
    return [
        FleetPart("valkey1", "valkey", (server, "--port", str(first), *common), home, first),
        FleetPart("valkey2", "valkey", (server, "--port", str(second), *common, *replica), home, second),
        FleetPart("sentinel", "sentinel", (server, str(config), "--sentinel"), home, watch),
    ]
