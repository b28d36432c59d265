"""Start Penstock for the bench: `python -m proxy dev` with a ready file, and settings in the environment.

`PROFILES` lists the settings that each case depends on. If config/default.toml lacks a required one, the case is skipped
for Penstock with that reason.
"""

import json
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine, processes, tls_files
from bench.loaders import BUILD
from tests.service import command_here

ROOT = Path(__file__).parent.parent
START_S = 180.0  # the first start unpacks a database and a dev chain
STOP_S = 30.0
# As many as any case has clients, like the baselines.
UPSTREAM_CONNECTIONS = 1024

Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings by dotted name: `wants` are set if this build has them, `needs` must exist."""

    name: str
    wants: Mapping[str, Value] = field(default_factory=dict)
    needs: Mapping[str, Value] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()  # further upstreams beside the case's stub
    addresses: Mapping[str, str] = field(
        default_factory=dict
    )  # settings whose value is the URL of the stub of this name
    networks: Mapping[str, str] = field(default_factory=dict)  # further networks, each with the stub of this name
    free_accounts: int = 0  # accounts with the plan Free, besides the usual ones
    connections: int = UPSTREAM_CONNECTIONS  # to each upstream; 0: the default of the settings
    block_time_ms: int = 0  # the dev chain also mines a block at this interval; 0: never


# No access log, like the baselines. Everything else of a call (key, envelope, both buckets, headers, metrics) stays on.
# The stub is not followed: it has no real blocks. The development chain is, so that attacks can create webhooks.
QUIET: dict[str, Value] = {"log.access": False, "metrics.port": 0, "follower.networks": '["dev/mainnet"]'}

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("forward", wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1}),
        Profile(
            "bitcoin",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1},
            networks={"bitcoin/regtest": "small"},
        ),
        Profile("beacon", wants=QUIET, needs={"cache.enabled": True}, networks={"ethereum-beacon/mainnet": "small"}),
        Profile(
            "in-flight",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False},
            needs={"rpc.depth": 16},
        ),
        # Overload shows only where an upstream gets fewer calls than there are clients.
        Profile(
            "usual-limit",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1},
            connections=0,
        ),
        # Hostile clients with the plan Free attack a network with a deep history and one that is polled. Webhooks may point to
        # this machine.
        Profile(
            "attacked",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1},
            networks={"base/mainnet": "evm", "solana/mainnet": "svm"},
            free_accounts=100,
            connections=0,
        ),
        Profile("hedged", wants={**QUIET, "cache.enabled": False, "cache.coalesce": False}, stubs=("late-too",)),
        Profile(
            "one-dead",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1},
            stubs=("small-too", "dead"),
        ),
        Profile(
            "three",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1},
            stubs=("small-too", "small-third"),
        ),
        Profile(
            "shared-limits",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False, "rpc.depth": 1},
            addresses={"valkey.limits_url": "valkey"},
        ),
        Profile("cached", wants=QUIET, needs={"cache.enabled": True}),
        Profile("joined", wants={**QUIET, "cache.enabled": False}, needs={"cache.coalesce": True}),
        Profile("idle", wants={**QUIET, "server.max_connections": 20000, "server.connections_per_address": 20000}),
        Profile(
            "sockets",
            wants={**QUIET, "cache.enabled": False, "server.connections_per_address": 20000},
            needs={"sockets.max_queue_bytes": 1 << 20},
            block_time_ms=2000,
        ),
        Profile(
            "tls",
            wants={**QUIET, "cache.enabled": False, "cache.coalesce": False},
            needs={"server.tls.cert": str(tls_files.CERT), "server.tls.key": str(tls_files.KEY)},
        ),
        Profile("cached-million", wants=QUIET, needs={"cache.enabled": True, "cache.bytes": 4 << 30}),
    )
}


class Service:
    """A Penstock that runs from the checkout `root`. `start` returns its base URL, a key whose limits are high enough for the
    bench, one of another account, and keys of Free accounts."""

    def __init__(self, workdir: Path, root: Path) -> None:
        self.workdir, self.root = workdir, root
        self.child: processes.Child | None = None

    def __repr__(self) -> str:
        return f"Service({self.child!r})"

    def start(
        self,
        upstream_urls: Sequence[str],
        *,
        connections: int,
        workers: int = 1,
        settings: Mapping[str, Value],
        networks: Mapping[str, str],
        free_accounts: int,
        cpu: Sequence[int],
        others: int,
    ) -> tuple[str, str, str, tuple[str, ...]]:
        """Start the workers on `cpu` and move database and dev chain to core `others`, where they delay nothing else."""
        self.workdir.mkdir(parents=True)
        ready, own = self.workdir / "ready.json", self.workdir / "own.toml"
        others_of = [_upstream(network, url, connections) for network, url in networks.items()]
        own.write_text(_links(upstream_urls, connections) + "".join(others_of))
        tls_files.make()
        port = processes.free_port()
        argv = [
            *(self._python(), "-m", "proxy", "dev", "--no-bundler", "--ready-file", str(ready), "--port", str(port)),
            *("--data", str(self.workdir / "data"), "--workers", str(workers)),
            *("--config", str(own)),
        ]
        environment = {"PYTHONPATH": str(self.root), **to_environment(settings)}
        log = self.workdir / "log"
        self.child = processes.start("penstock", argv, cpus=cpu, log=log, env=environment, cwd=self.root)
        found = self._wait_for(ready)
        free_keys = tuple(self._free_key(number) for number in range(free_accounts))
        self._pin(port, cpu, others)
        keys = found["keys"]
        return str(found["base_url"]), str(keys["enterprise"]), str(keys["growth"]), free_keys

    def _free_key(self, number: int) -> str:
        """The key of a new account with the plan Free."""
        made = self._command(
            "accounts", "create", "--name", "Free", "--email", f"free{number}@example.com", "--plan", "free"
        )
        return str(self._command("keys", "create", "--account", made["id"], "--mode", "live")["key"])

    def _command(self, *words: str) -> dict[str, str]:
        done = command_here(*words, "--json", "--data", str(self.workdir / "data"))
        if done.returncode:
            raise processes.StartFailed(f"penstock {words[0]} {words[1]}: {done.stderr}")
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def _python(self) -> str:
        """The checkout's own interpreter, whose environment has its compiled hot path."""
        own = self.root / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def stop(self) -> None:
        if self.child:
            self.child.stop(grace_s=STOP_S)

    def keep_log(self) -> str:
        """Copy the log of a failed start out of the temporary directory."""
        if self.child is None:
            return ""
        kept = BUILD / "penstock.log"
        shutil.copyfile(self.child.log, kept)
        return f" (log: {os.path.relpath(kept)})"

    def _wait_for(self, ready: Path) -> dict[str, dict[str, str]]:
        assert self.child is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if fault := self.child.fault():
                raise processes.StartFailed(f"`python -m proxy dev` {fault}")
            if ready.exists():
                try:
                    found: dict[str, dict[str, str]] = json.loads(ready.read_text())
                    return found
                except json.JSONDecodeError:
                    pass  # still being written
            time.sleep(0.1)
        raise processes.StartFailed(f"`python -m proxy dev` was not ready within {START_S:.0f} s")

    def _pin(self, port: int, cpu: Sequence[int], others: int) -> None:
        assert self.child is not None
        workers = set(machine.listeners(port))
        for pid in machine.descendants(self.child.pid):
            machine.pin(pid, cpu if pid in workers else [others])
            if pid not in workers:
                machine.be_idle(pid)


def _links(urls: Sequence[str], connections: int) -> str:
    """The settings of the upstreams, and of a bundler at the first of them."""
    limit = _limit(connections)
    upstreams = [f"[[upstreams]]\n{_link(url)}{limit}" for url in urls]
    return "".join((f"[[bundlers]]\n{_link(urls[0])}", *upstreams))


def _upstream(network: str, url: str, connections: int) -> str:
    return f'[[upstreams]]\nnetwork = "{network}"\nurl = "{url}"\n{_limit(connections)}'


def _limit(connections: int) -> str:
    return f"connections = {connections}\n" if connections else ""


def _link(url: str) -> str:
    authority = f'ca = "{tls_files.CERT}"\n' if url.startswith("https:") else ""
    return f'network = "ethereum/mainnet"\nurl = "{url}"\n{authority}'


def to_environment(settings: Mapping[str, Value]) -> dict[str, str]:
    """Convert server.port=1 to PENSTOCK_SERVER__PORT=1."""

    def text(value: Value) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return {f"PENSTOCK_{name.upper().replace('.', '__')}": text(value) for name, value in settings.items()}


def settings_for(profile: Profile, extra: Mapping[str, Value], root: Path) -> dict[str, Value]:
    """Return the profile's settings that the checkout has; raise StartFailed if a required one is missing."""
    known = _known_settings(root)
    if lacking := [name for name in profile.needs if name not in known]:
        raise processes.StartFailed(f"this build has no setting {', '.join(lacking)}")
    chain = {"block_time_ms": profile.block_time_ms} if profile.block_time_ms else {}
    wanted = {name: value for name, value in profile.wants.items() if name in known}
    return {**wanted, **profile.needs, **chain, **extra}


def _known_settings(root: Path) -> set[str]:
    path = root / "config" / "default.toml"
    if not path.exists():
        return set()
    return set(_names(tomllib.loads(path.read_text())))


def _names(table: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")


def missing(root: Path) -> str | None:
    """Reason why Penstock cannot be started from the checkout, or None."""
    return None if os.path.exists(root / "proxy" / "__main__.py") else f"{root} has no proxy/__main__.py"
