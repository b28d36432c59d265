"""The files in config/methods: which methods exist, and how an operator adds more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from web3._utils.rpc_abi import RPC

from proxy.errors import StartError
from proxy.settings import CONFIG, load_tables
from tests.rpc_harness import rpc_harness
from tests.shipped_tables import TABLES
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop

EVM = TABLES.methods["evm"]
CLIENTS = Path(__file__).parents[1] / "clients" / "node_modules"
# They need a node's own keys or work, or change the node.
REFUSED = re.compile(
    r"(personal|admin|engine|miner|evm|testing|hardhat|anvil|wallet)_"
    r"|eth_(sign|sendTransaction|sendUnsigned|getWork|submit|resend|requestAccounts|sendUserOp)"
)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Adds a file to the shipped methods. Returns the configuration."""

    def write(text: str) -> Path:
        config = tmp_path / "config"
        shutil.copytree(CONFIG, config, ignore=shutil.ignore_patterns("tokens", "devnet"))
        (config / "methods" / "own.toml").write_text(text)
        return config

    return write


def faults_of(config: Path) -> tuple[str, ...]:
    with pytest.raises(StartError) as caught:
        load_tables(config)
    return caught.value.faults


def test_every_method_that_web3_py_names_is_known_unless_it_needs_a_node_of_ones_own() -> None:
    named = {value for name, value in vars(RPC).items() if name.isidentifier() and "_" in str(value)[1:-1]}
    methods = {value for value in named if isinstance(value, str) and re.fullmatch(r"[a-z0-9]+_[a-zA-Z0-9]+", value)}
    assert len(methods) > 60
    assert {name for name in methods if not REFUSED.match(name)} <= set(EVM)


@pytest.mark.parametrize(
    ("package", "pattern"),
    [
        ("ethers/lib.esm/providers", r'method: "([a-z0-9]+_\w+)"'),
        ("viem/actions/public", r"method: '([a-z0-9]+_\w+)'"),
        ("viem/linea/actions", r"method: '([a-z0-9]+_\w+)'"),
        ("viem/zksync/actions", r"method: '([a-z0-9]+_\w+)'"),
    ],
)
def test_every_method_that_a_client_library_calls_is_known(package: str, pattern: str) -> None:
    files = [path for path in (CLIENTS / package).rglob("*") if path.suffix in (".js", ".ts")]
    if not files:
        pytest.skip("the client libraries are not installed")
    named = {name for path in files for name in re.findall(pattern, path.read_text())}
    assert named
    assert {name for name in named if not REFUSED.match(name)} <= set(EVM)


@pytest.mark.parametrize(
    "method",
    [
        *("eth_accounts", "eth_getRawTransactionByHash", "eth_getStorageValues", "eth_config", "eth_baseFee"),
        *("eth_capabilities", "txpool_content", "txpool_status", "net_peerCount", "eth_sendRawTransactionSync"),
        *("linea_estimateGas", "zks_getBridgehubContract", "arb_getL1Confirmations", "optimism_syncStatus"),
        *("eth_getHeaderByNumber", "eth_callMany", "eth_getAccount", "ots_getApiLevel", "erigon_getHeaderByNumber"),
    ],
)
def test_method_of_a_client_or_a_chain_is_known(method: str) -> None:
    assert method in EVM


def test_chains_that_restrict_a_file_exist() -> None:
    named = {chain for table in TABLES.methods.values() for method in table.values() for chain in method.chains}
    assert named <= set(TABLES.chains.chains)


@on_uvloop
async def test_method_of_one_chain_does_not_exist_on_another() -> None:
    async with rpc_harness(1, network="linea/mainnet") as harness:
        assert await harness.result("linea_getTransactionExclusionStatusV1", ["0x1"])
    async with rpc_harness(1, network="arbitrum/mainnet") as harness:
        reply = await harness.call("linea_getTransactionExclusionStatusV1", ["0x1"])
        assert reply.json["error"]["code"] == -32601
        assert await harness.result("arb_getL1Confirmations", ["0x1"])


@on_uvloop
async def test_accounts_are_always_empty_and_never_those_of_an_upstream() -> None:
    async with rpc_harness(1) as harness:
        harness.upstreams[0].answers["eth_accounts"] = lambda _: ["0x" + "ab" * 20]
        for _ in range(2):
            assert await harness.result("eth_accounts") == []
        batch = (await harness.batch(("eth_accounts", []), ("eth_gasPrice", []), ("eth_accounts", []))).json
        assert [batch[index]["result"] for index in (0, 2)] == [[], []]
        assert harness.count("eth_accounts") == 0


@on_uvloop
async def test_operator_adds_methods_in_a_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'family = "evm"\nchains = ["ethereum"]\n[methods]\nacme_quote = { price = 9, block_at = 0, cache = "block" }\n'
    )
    monkeypatch.setattr(worker_module, "TABLES", load_tables(write(text)))

    async with rpc_harness(1, network="ethereum/mainnet") as harness:
        for expected in ("miss", "hit"):
            reply = await harness.call("acme_quote", ["latest"])
            assert (reply.headers["x-cache"], reply.headers["x-compute-units"]) == (expected, "9")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('family = "evm"', 'own.toml: settings: "methods" is a required property'),
        ('family = "move"\n[methods]\na_b = { price = 1 }', "own.toml: family: there is no family 'move'; use one of"),
        ("[methods]\neth_new = {}", 'own.toml: methods.eth_new: "price" is a required property'),
        ("[methods]\neth_call = { price = 1 }", "own.toml: methods.eth_call: already defined in another file"),
        ("[methods]\na_b = { price = 201 }", "own.toml: methods.a_b.price: "),
        ('[methods]\na_b = { price = 1, scopes = ["all"] }', "own.toml: methods.a_b.scopes.0: "),
        ('[methods]\na_b = { price = 1, cache = "block" }', "own.toml: methods.a_b: block_at is missing"),
        (
            '[methods]\na_b = { price = 1, kind = "write", cache = "head" }',
            "own.toml: methods.a_b: a write has neither",
        ),
        ('[methods]\na_b = { price = 1, kind = "write", answer = "1" }', "own.toml: methods.a_b: a write has neither"),
        ('[methods]\na_b = { price = 1, answer = "[" }', "own.toml: methods.a_b: answer must be JSON"),
        ("[methods]\na_b = { price = 1, identified = true }", 'own.toml: methods.a_b: identified needs kind = "write"'),
        ("[methods]\na_b = { price = 1, creates_filter = true }", "own.toml: methods.a_b: creates_filter needs"),
        ("[methods]\na_b = { price = 1, splits = true }", "own.toml: methods.a_b: splits needs span"),
        ("[methods]\na_b = { price = 1, chain = 1 }", "own.toml: methods.a_b.chain: there is no such key"),
    ],
)
def test_fault_in_a_file_is_named(write: Write, text: str, fault: str) -> None:
    (found,) = faults_of(write(text if text.startswith("family") else f'family = "evm"\n{text}'))
    assert found.startswith(fault)
