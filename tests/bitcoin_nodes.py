"""Nodes of Bitcoin-like chains on their regression test networks: litecoind (a fork of Bitcoin Core) and btcd.

The nodes of one kind are peers. The first one makes blocks, and the others follow it, also to another branch. litecoind is a
package of Debian (`apt-get install litecoind`), and `make btcd` builds btcd. Tests are skipped without them.
"""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from tests import node_programs
from tests.service import until

START_S = 60.0
USER, PASSWORD = "user", "secret"
# An address of btcd's regression test network: its owner does not matter.
MINER = "mipcBbFg9gMiCh81Kj8tqqdgoZub1ZJRfn"
# Options of btcd for a chain that no file knows.
SIMNET = ("--simnet", "--miningaddr=SMJ2EsMn4iEfrGr1c7hW9KnykTxwffDZkM", "--txindex")


class _RawReply(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None


class BitcoinNode:
    """A running node. `ask` raises AssertionError if the node returns an error."""

    network = ""
    can_be_cut_off = True

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.process = process
        self.session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} :{self.port}>"

    @property
    def url(self) -> str:
        return f"http://{USER}:{PASSWORD}@127.0.0.1:{self.port}/"

    async def raw(self, method: str, params: Any = ()) -> tuple[bytes, Any]:
        """The bytes of the result, and the error."""
        assert self.session is not None
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        body = orjson.dumps({"jsonrpc": "1.0", "id": 1, "method": method, "params": params})
        headers = {"Authorization": f"Basic {pair}", "Content-Type": "application/json"}
        async with self.session.post(f"http://127.0.0.1:{self.port}/", data=body, headers=headers) as response:
            reply = msgspec.json.decode(await response.read(), type=_RawReply)
        return bytes(reply.result), reply.error

    async def ask(self, method: str, *params: Any) -> Any:
        result, error = await self.raw(method, params)
        assert error is None, (method, params, error)
        return orjson.loads(result)

    async def best(self) -> str:
        return str(await self.ask("getbestblockhash"))

    async def make(self, blocks: int) -> list[str]:
        raise NotImplementedError

    async def reorganise(self, depth: int) -> None:
        """Replace the last blocks by one more than there were."""
        height = await self.ask("getblockcount")
        await self.ask("invalidateblock", await self.ask("getblockhash", height - depth + 1))
        await self.make(depth + 1)


class LitecoinNode(BitcoinNode):
    network = "litecoin/regtest"
    address = ""

    async def open_wallet(self) -> None:
        await self.ask("createwallet", "w")
        self.address = await self.ask("getnewaddress")

    async def make(self, blocks: int) -> list[str]:
        return list(await self.ask("generatetoaddress", blocks, self.address))

    async def reorganise(self, depth: int) -> None:
        # A block with the same miner, time and parent would be the one that was just made invalid.
        self.address = await self.ask("getnewaddress")
        await super().reorganise(depth)


class BtcdNode(BitcoinNode):
    network = "bitcoin/regtest"
    can_be_cut_off = False

    async def make(self, blocks: int) -> list[str]:
        return list(await self.ask("generate", blocks))


def litecoind() -> Path:
    if (found := Path("/usr/lib/litecoin/litecoind")).exists():
        return found
    if (path := shutil.which("litecoind")) is not None:
        return Path(path)
    pytest.skip("litecoind is not installed (on Debian: apt-get install litecoind)")


def btcd() -> Path:
    return node_programs.require("btcd")


def _litecoind_argv(
    directory: Path, port: int, peer_port: int, peers: Sequence[int], options: Sequence[str]
) -> list[str]:
    return [
        *(str(litecoind()), "-regtest", f"-datadir={directory}", "-server", "-fallbackfee=0.001", "-printtoconsole=0"),
        *(f"-rpcuser={USER}", f"-rpcpassword={PASSWORD}", f"-rpcport={port}", "-rpcbind=127.0.0.1"),
        *("-rpcallowip=127.0.0.1", "-listen=1", f"-bind=127.0.0.1:{peer_port}", "-dnsseed=0", "-discover=0"),
        *("-rpcworkqueue=200", "-dbcache=16"),
        *(f"-connect=127.0.0.1:{peer}" for peer in peers),
        *(options or ["-txindex"]),
    ]


def _btcd_argv(directory: Path, port: int, peer_port: int, peers: Sequence[int], options: Sequence[str]) -> list[str]:
    network = () if "--simnet" in options else ("--regtest", f"--miningaddr={MINER}")
    return [
        *(str(btcd()), *network, f"--datadir={directory}", f"--logdir={directory}", f"--rpcuser={USER}"),
        *(f"--rpcpass={PASSWORD}", "--notls", f"--rpclisten=127.0.0.1:{port}", f"--listen=127.0.0.1:{peer_port}"),
        *("--nodnsseed", "--nobanning", f"--configfile={directory}/none.conf"),
        *("--rpcmaxclients=200",),
        *(f"--connect=127.0.0.1:{peer}" for peer in peers),
        *(options or ["--txindex"]),
    ]


@contextmanager
def bitcoin_nodes(kind: str, directory: Path, options: Sequence[Sequence[str]]) -> Iterator[list[BitcoinNode]]:
    """Nodes that are peers of the first one, each with its own options."""
    make_argv, node_type = (_litecoind_argv, LitecoinNode) if kind == "litecoind" else (_btcd_argv, BtcdNode)
    nodes: list[BitcoinNode] = []
    first_peer = free_port()
    try:
        for index, given in enumerate(options):
            home = directory / f"{kind}-{index}"
            home.mkdir()
            (home / "none.conf").touch()
            port, peer_port = free_port(), first_peer if index == 0 else free_port()
            argv = make_argv(home, port, peer_port, [first_peer] if index else [], given)
            output = subprocess.DEVNULL
            process = subprocess.Popen(
                argv, stdout=output, stderr=output, preexec_fn=partial(die_with_parent, signal.SIGTERM)
            )
            nodes.append(node_type(port, process))
        yield nodes
    finally:
        node_programs.end(node.process for node in nodes)


async def wait_for(nodes: Sequence[BitcoinNode], session: aiohttp.ClientSession) -> None:
    """Wait until the nodes answer."""
    deadline = time.monotonic() + START_S

    async def answers(node: BitcoinNode) -> bool:
        with suppress(aiohttp.ClientError, OSError, AssertionError, msgspec.DecodeError):
            return isinstance(await node.ask("getblockcount"), int)
        return False

    for node in nodes:
        node.session = session
        while not await answers(node):
            assert node.process.poll() is None, f"{node} has ended"
            assert time.monotonic() < deadline, f"{node} does not answer"
    if isinstance(nodes[0], LitecoinNode):
        await nodes[0].open_wallet()


async def agree(nodes: Sequence[BitcoinNode]) -> None:
    """Wait until all nodes have the first one's newest block."""
    best = await nodes[0].best()

    async def is_so() -> bool:
        return {await node.best() for node in nodes} == {best}

    await until(is_so, within_s=30)
