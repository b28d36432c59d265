"""Nodes of real chains, Hardhat's and geth's, that make the blocks a test plans.

A branch is a sequence of seeds, one for each block after the first. A block follows from the seeds up to its own, so nodes
that follow the same branch have the same blocks, down to the hash. A node that follows a part of the branch lags, one with
other seeds is on a fork, and a node that follows another branch than before is reorganised.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from eth_account import Account

from proxy.dev.chain import free_port
from proxy.dev.child import die_with_parent
from proxy.dev.funded_accounts import FUNDED
from proxy.dev.npm_packages import DEVNET, node_binary
from tests import node_programs

Branch = tuple[int, ...]

CHAIN_ID = 31337
FIRST_TIME = 1_700_000_000
START_S = 60.0
# A contract that returns its word. With data, it sets the word and emits a log with it as the topic.
CODE = "3615601257" + "6000358060005560006000a100" + "5b60005460005260206000f3"
DEPLOYS_CODE = "0x7d" + CODE + "600052601e6002f3"
CONTRACT = "0x5FbDB2315678afecb367f032d93F642f64180aa3"
# Each block has fewer transactions than this.
MOST_TRANSACTIONS = 3


def transactions_of(seed: int) -> int:
    return seed % MOST_TRANSACTIONS


@cache
def signed(nonce: int, variant: int) -> tuple[str, str]:
    """A transaction: its raw form and its hash. The first one deploys the contract, the others set its word."""
    data = DEPLOYS_CODE if nonce == 0 else f"0x{(nonce << 8 | variant):064x}"
    fields: dict[str, Any] = {"type": 2, "chainId": CHAIN_ID, "nonce": nonce, "data": data, "value": min(nonce, 1)}
    fields |= {"gas": 200_000, "maxFeePerGas": 10**12, "maxPriorityFeePerGas": 10**9}
    found = Account.sign_transaction(fields if nonce == 0 else {**fields, "to": CONTRACT}, FUNDED.private_key)
    return found.raw_transaction.to_0x_hex(), found.hash.to_0x_hex()


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    number: int
    # The address that the fees go to, which makes the block unlike those of other seeds.
    miner: str
    transactions: tuple[tuple[str, str], ...]

    @property
    def time(self) -> int:
        return FIRST_TIME + self.number

    @property
    def random(self) -> str:
        return f"0x{self.number:064x}"


def planned(branch: Branch) -> PlannedBlock:
    """The last block of a branch. Other branches may have some of its transactions too."""
    number, seed = len(branch), branch[-1]
    first = 1 + sum(map(transactions_of, branch[1:-1])) if number > 1 else 0
    variant = seed // MOST_TRANSACTIONS % 2
    found = [signed(nonce, variant) for nonce in range(first, first + (transactions_of(seed) if number > 1 else 1))]
    return PlannedBlock(number, f"0x{(1 << 64) + seed:040x}", tuple(found))


class RealNode(ABC):
    """A node, and the branch that it follows. `session`: of the event loop in which it is asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.branch: Branch = ()
        self.session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} :{self.port} of {len(self.branch)} blocks>"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def reply(self, method: str, params: Sequence[Any] = ()) -> dict[str, Any]:
        assert self.session is not None
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
        async with self.session.post(self.url, json=call) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def ask(self, method: str, *params: Any) -> Any:
        reply = await self.reply(method, params)
        assert "result" in reply, (method, params, reply)
        return reply["result"]

    async def follow(self, branch: Branch) -> None:
        """Go back to the last common block, then on to the end of the branch."""
        pairs = enumerate(zip(self.branch, branch, strict=False))
        common = next(
            (height for height, (ours, theirs) in pairs if ours != theirs), min(len(self.branch), len(branch))
        )
        if common < len(self.branch):
            await self.set_back(common)
        for number in range(common + 1, len(branch) + 1):
            await self.extend(planned(branch[:number]))
        self.branch = branch

    @abstractmethod
    async def set_back(self, number: int) -> None:
        """Remove all blocks after this one."""

    @abstractmethod
    async def extend(self, block: PlannedBlock) -> None: ...


class HardhatNode(RealNode):
    def __init__(self, port: int) -> None:
        super().__init__(port)
        # By the number of the block that was the last at the time.
        self._snapshots: list[str] = []

    async def set_back(self, number: int) -> None:
        assert await self.ask("evm_revert", self._snapshots[number])
        # A snapshot can be used once, and ends those after it.
        del self._snapshots[number:]

    async def extend(self, block: PlannedBlock) -> None:
        if len(self._snapshots) < block.number:
            self._snapshots.append(await self.ask("evm_snapshot"))
        await self.ask("hardhat_setCoinbase", block.miner)
        await self.ask("hardhat_setPrevRandao", block.random)
        for raw, _ in block.transactions:
            await self.ask("eth_sendRawTransaction", raw)
        await self.ask("evm_mine", hex(block.time))


class GethNode(RealNode):
    async def set_back(self, number: int) -> None:
        await self.ask("debug_setHead", hex(number))

    async def extend(self, block: PlannedBlock) -> None:
        attributes = {
            "timestamp": hex(block.time),
            "prevRandao": block.random,
            "suggestedFeeRecipient": block.miner,
            "withdrawals": [],
            "parentBeaconBlockRoot": block.random,
        }
        await self.ask("testing_commitBlockV1", attributes, [raw for raw, _ in block.transactions], "0x")


# Starting nodes


@contextmanager
def hardhat_nodes(count: int, *, chain_ids: Sequence[int] = ()) -> Iterator[list[RealNode]]:
    """Nodes of one chain, or of the given ones."""
    script = Path(__file__).with_name("hardhat_nodes.mjs")
    ids = chain_ids or [CHAIN_ID] * count
    argv = [str(node_binary()), str(script), str(DEVNET), str(FIRST_TIME), *map(str, ids)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield [HardhatNode(port) for port in json.loads(process.stdout.readline())]
    finally:
        process.communicate()


# All rules up to Cancun. Later ones need contracts in the first block.
_RULES = dict.fromkeys(
    ("homesteadBlock", "eip150Block", "eip155Block", "eip158Block", "byzantiumBlock", "constantinopleBlock",
     "petersburgBlock", "istanbulBlock", "berlinBlock", "londonBlock", "shanghaiTime", "cancunTime",
     "terminalTotalDifficulty"), 0,
)  # fmt: skip
_BLOBS = {"cancun": {"target": 3, "max": 6, "baseFeeUpdateFraction": 3338477}}
_FIRST_BLOCK = {
    "config": {"chainId": CHAIN_ID, **_RULES, "blobSchedule": _BLOBS},
    "timestamp": hex(FIRST_TIME),
    "gasLimit": hex(60_000_000),
    "difficulty": "0x0",
    "baseFeePerGas": hex(10**9),
    "alloc": {FUNDED.address: {"balance": hex(10**22)}},
}
_OPTIONS = (
    *("--networkid", str(CHAIN_ID), "--nodiscover", "--maxpeers", "0", "--port", "0", "--ipcdisable"),
    *("--syncmode", "full", "--gcmode", "archive", "--cache", "64", "--verbosity", "2"),
    *("--http", "--http.addr", "127.0.0.1", "--http.api", "eth,net,web3,debug,testing"),
    *(
        "--ws",
        "--ws.addr",
        "127.0.0.1",
        "--ws.api",
        "eth,net,web3",
        "--authrpc.addr",
        "127.0.0.1",
        "--authrpc.port",
        "0",
    ),
)


@contextmanager
def geth_nodes(count: int, directory: Path, *options: str) -> Iterator[list[RealNode]]:
    """Nodes with the same first block, each with its own files in `directory`."""
    geth = node_programs.require("geth", "Go and some minutes")
    with ExitStack() as stack:
        yield [stack.enter_context(_geth_node(geth, directory / f"geth-{n}", options)) for n in range(count)]


@contextmanager
def _geth_node(geth: Path, directory: Path, options: Sequence[str]) -> Iterator[RealNode]:
    directory.mkdir(parents=True)
    (directory / "genesis.json").write_text(json.dumps(_FIRST_BLOCK))
    files = ("--datadir", str(directory))
    # The first block is stored in the scheme that all others will have.
    scheme = options[options.index("--state.scheme") :][:2] if "--state.scheme" in options else ()
    subprocess.run([geth, "init", *files, *scheme, str(directory / "genesis.json")], check=True, capture_output=True)
    port = str(free_port())
    argv: list[str | Path] = [geth, *files, *_OPTIONS, "--http.port", port, "--ws.port", port, *options]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    try:
        _wait_for(int(port), process, directory / "log")
        yield GethNode(int(port))
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"geth did not start:\n{log.read_text()}")
