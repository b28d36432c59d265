"""Nodes of a Cosmos SDK chain: simd, the application with which ibc-go is tested. `make simd` builds it; without it, tests are
skipped.

The first one makes a block every half a second, and the others follow it. Each has the JSON-RPC of CometBFT and the REST API.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from tests import node_programs

CHAIN = "sim-1"
DENOM = "stake"
_KEYRING = ("--keyring-backend", "test")


@dataclass(frozen=True)
class SimdNode:
    """`rpc` and `rest`: its ports."""

    home: Path
    rpc: int
    rest: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.rest}"

    @property
    def rpc_url(self) -> str:
        return f"http://127.0.0.1:{self.rpc}/"

    @property
    def owner(self) -> str:
        """The address of the account that has all coins."""
        return _run(self.home, "keys", "show", "owner", "--address", *_KEYRING).strip()

    def signed_payment(self, to: str, amount: int) -> str:
        """A signed transaction of the owner in base64, which is not sent yet."""
        coins, node = f"{amount}{DENOM}", ("--node", f"tcp://127.0.0.1:{self.rpc}", "--chain-id", CHAIN)
        made, signed = self.home / "made.json", self.home / "signed.json"
        made.write_text(
            _run(self.home, "tx", "bank", "send", self.owner, to, coins, "--generate-only", *node, *_KEYRING)
        )
        signed.write_text(_run(self.home, "tx", "sign", str(made), "--from", "owner", *node, *_KEYRING))
        return _run(self.home, "tx", "encode", str(signed)).strip()


def simd() -> Path:
    return node_programs.require("simd", "Go and some minutes")


def _run(home: Path, *words: str) -> str:
    done = subprocess.run([str(simd()), *words, "--home", str(home)], check=True, capture_output=True, timeout=60)
    return done.stdout.decode()


@contextmanager
def simd_nodes(directory: Path, options: Sequence[Sequence[str]]) -> Iterator[list[SimdNode]]:
    """A validator, and nodes that follow it, each with its own options."""
    homes = [directory / f"simd-{index}" for index in range(len(options))]
    for home in homes:
        _run(home, "init", home.name, "--chain-id", CHAIN)
        _configure(home)
    _make_genesis(homes[0])
    nodes: list[SimdNode] = []
    peer_port = free_port()
    peer = f"{_run(homes[0], 'comet', 'show-node-id').strip()}@127.0.0.1:{peer_port}"
    try:
        for index, (home, given) in enumerate(zip(homes, options, strict=True)):
            if index:
                shutil.copy(homes[0] / "config" / "genesis.json", home / "config" / "genesis.json")
            peers = (str(peer_port), "") if index == 0 else (str(free_port()), peer)
            nodes.append(_start(home, peers, given))
        yield nodes
    finally:
        node_programs.end(node.process for node in nodes)


def _configure(home: Path) -> None:
    """Make blocks fast, and let several nodes of this host follow another."""
    file = home / "config" / "config.toml"
    text = re.sub(r'timeout_commit = "[^"]*"', 'timeout_commit = "500ms"', file.read_text())
    file.write_text(text.replace("allow_duplicate_ip = false", "allow_duplicate_ip = true"))


def _make_genesis(home: Path) -> None:
    _run(home, "keys", "add", "owner", *_KEYRING)
    _run(home, "genesis", "add-genesis-account", "owner", f"1000000000{DENOM}", *_KEYRING)
    _run(home, "genesis", "gentx", "owner", f"100000000{DENOM}", "--chain-id", CHAIN, *_KEYRING)
    _run(home, "genesis", "collect-gentxs")
    # Interest is paid for every block, so that state differs between blocks.
    file = home / "config" / "genesis.json"
    genesis: dict[str, Any] = json.loads(file.read_text())
    genesis["app_state"]["mint"]["params"]["blocks_per_year"] = "10000"
    file.write_text(json.dumps(genesis))


def _start(home: Path, peers: tuple[str, str], options: Sequence[str]) -> SimdNode:
    rpc, rest = free_port(), free_port()
    own, peer = peers
    argv = [str(simd()), "start", "--home", str(home), "--minimum-gas-prices", f"0{DENOM}", "--grpc.enable=true"]
    argv += ["--api.enable", "--api.address", f"tcp://127.0.0.1:{rest}", "--rpc.laddr", f"tcp://127.0.0.1:{rpc}"]
    argv += ["--p2p.laddr", f"tcp://127.0.0.1:{own}", "--grpc.address", f"127.0.0.1:{free_port()}"]
    argv += ["--rpc.pprof_laddr", "", "--p2p.persistent_peers", peer, *options]
    with (home / "log").open("wb") as log:
        end_too = partial(die_with_parent, signal.SIGTERM)
        return SimdNode(home, rpc, rest, subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=end_too))
