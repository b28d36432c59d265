"""viem, ethers and web3.py through the service: they read the right values and raise their own errors.

Each library has a script in tests/clients that runs everything once, over the library's own HTTP transport, and prints the
results. Expected values are read from the chain directly, not through the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.core import access
from tests.client_scripts import run_script
from tests.flows.upstream import Upstream, echo, reply
from tests.service import Service, until

SCRIPTS = {"viem": "viem.mjs", "ethers": "ethers.mjs", "web3.py": "web3_py.py"}
CLIENTS = tuple(SCRIPTS)
RUN_S = 60.0

# Copies its calldata and reverts with it: calling `Error(string)` reverts as Solidity's `require` does.
REVERTER = "366000600037366000fd"
# Copies its calldata and logs it; the first word is the topic.
LOGGER = "366000600037600035366000a100"
TOPIC = "0x" + "07" * 32
VALUE_WEI = 10**15


def encoded(selector: str, *words: int | str) -> str:
    """Calldata with 32-byte words: numbers, or text padded on the right."""
    return (
        "0x" + selector + "".join(f"{w:064x}" if isinstance(w, int) else w.encode().hex().ljust(64, "0") for w in words)
    )


REVERTED = encoded("08c379a0", 32, len("not today"), "not today")
# The data of each revert.
DATA = {
    "revert": REVERTED,
    "revert_bare": "0x",
    "revert_estimate": REVERTED,
    "contract_revert": REVERTED,
    "contract_panic": encoded("4e487b71", 17),
    "contract_custom": encoded("cb362b34", 42),
}
# The names of each error in viem, ethers and web3.py. ethers raises none for missing blocks and transactions.
ERRORS: dict[str, tuple[str, str | None, str]] = {
    "revert": ("ExecutionRevertedError", "CALL_EXCEPTION", "ContractLogicError"),
    "revert_bare": ("ExecutionRevertedError", "CALL_EXCEPTION", "ContractLogicError"),
    "revert_estimate": ("ExecutionRevertedError", "CALL_EXCEPTION", "ContractLogicError"),
    "contract_revert": ("ContractFunctionRevertedError", "CALL_EXCEPTION", "ContractLogicError"),
    "contract_panic": ("ContractFunctionRevertedError", "CALL_EXCEPTION", "ContractPanicError"),
    "contract_custom": ("ContractFunctionRevertedError", "CALL_EXCEPTION", "ContractCustomError"),
    "unknown_method": ("MethodNotFoundRpcError", "UNSUPPORTED_OPERATION", "MethodUnavailable"),
    "bad_params": ("InvalidParamsRpcError", "UNKNOWN_ERROR", "Web3RPCError"),
    "no_transaction": ("TransactionNotFoundError", None, "TransactionNotFound"),
    "no_block": ("BlockNotFoundError", None, "BlockNotFound"),
    "bad_key": ("HttpRequestError", "SERVER_ERROR", "HTTPError"),
    # None of them recognises the development chain's message for this; they do recognise geth's (below).
    "no_funds": ("InvalidInputRpcError", "UNKNOWN_ERROR", "Web3RPCError"),
    "nonce_too_low": ("NonceTooLowError", "NONCE_EXPIRED", "Web3RPCError"),
}
RPC_CODES = {"unknown_method": -32601, "bad_params": -32602, "no_funds": -32000, "nonce_too_low": -32000}
# geth's messages for transactions that it refuses, and the errors that the libraries make of them.
GETH: dict[str, tuple[str, tuple[str, str, str]]] = {
    "no_funds": (
        "insufficient funds for gas * price + value: balance 0, tx cost 1",
        ("InsufficientFundsError", "INSUFFICIENT_FUNDS", "Web3RPCError"),
    ),
    "nonce_too_low": (
        "nonce too low: next nonce 5, tx nonce 1",
        ("NonceTooLowError", "NONCE_EXPIRED", "Web3RPCError"),
    ),
    "underpriced": (
        "replacement transaction underpriced",
        ("InvalidInputRpcError", "REPLACEMENT_UNDERPRICED", "Web3RPCError"),
    ),
}
KNOWN = "already known"
FAR_CHAIN_ID = 11155111


@dataclass(frozen=True)
class Chain:
    """The development chain, called directly."""

    url: str
    session: aiohttp.ClientSession

    async def call(self, method: str, *params: Any) -> Any:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self.session.post(self.url, json=call) as response:
            return (await response.json())["result"]

    async def number(self, method: str, *params: Any) -> int:
        return int(await self.call(method, *params), 16)

    async def send(self, **transaction: str) -> dict[str, Any]:
        """Send a transaction from an account of the node; return the receipt."""
        sender = (await self.call("eth_accounts"))[5]
        sent = await self.call("eth_sendTransaction", {"from": sender, "gas": "0x30d40", **transaction})
        receipt: dict[str, Any] = await self.call("eth_getTransactionReceipt", sent)
        return receipt

    async def deploy(self, code: str) -> str:
        """Deploy a contract with this code: the init code copies everything after its first twelve bytes."""
        size = f"{len(code) // 2:02x}"
        return str((await self.send(data=f"0x60{size}600c60003960{size}6000f3{code}"))["contractAddress"])


@dataclass(frozen=True)
class Run:
    """A run of one library's script: its task, the chain's values before it, and the script's output."""

    client: str
    task: dict[str, Any]
    before: dict[str, Any]
    results: list[Any]
    seen: dict[str, Any]

    def named(self, names: tuple[str | None, ...]) -> str | None:
        return names[CLIENTS.index(self.client)]


@pytest.fixture(scope="module")
async def chain(service: Service) -> Chain:
    return Chain(service.ready["upstream_url"], service.nodes)


@pytest.fixture(scope="module")
async def contracts(chain: Chain) -> dict[str, str]:
    return {"reverter": await chain.deploy(REVERTER), "logger": await chain.deploy(LOGGER)}


@pytest.fixture(scope="module", params=CLIENTS)
async def run(
    request: pytest.FixtureRequest, service: Service, chain: Chain, contracts: dict[str, str], upstream_server: Upstream
) -> Run:
    await chain.send(to=contracts["logger"], data=TOPIC)
    head = await chain.number("eth_blockNumber")
    await until(lambda: has_head(service, head))
    task = {
        **await a_task(service, contracts, head),
        "recipient": "0x" + f"{0x5E + CLIENTS.index(request.param):02x}" * 20,
    }
    before = await reads(chain, task, service.ready["funded_account"]["address"])
    results = [await chain.call(call["method"], *call["params"]) for call in task["calls"] if call["succeeds"]]
    upstream_server.act = refusing(iter([*(message for message, _ in GETH.values()), KNOWN]))
    seen = await asyncio.to_thread(run_script, SCRIPTS[request.param], task, within_s=RUN_S)
    return Run(request.param, task, before, results, seen)


async def has_head(service: Service, number: int) -> bool:
    return int((await (await service.rpc("eth_blockNumber")).json())["result"], 16) >= number


async def a_task(service: Service, contracts: dict[str, str], head: int) -> dict[str, Any]:
    funded = service.ready["funded_account"]
    account = (await service.new_account("free"))["id"]
    free, tight = [await service.new_key(account, *words) for words in ((), ("--requests-per-second", "2"))]
    return {
        **contracts,
        "url": f"{service.base}/rpc/dev/mainnet",
        "chain_id": 31337,
        "far_url": f"{service.base}/rpc/ethereum/sepolia",
        "far_chain_id": FAR_CHAIN_ID,
        "key": service.keys["enterprise"],
        "free_key": free["key"],
        "tight_key": tight["key"],
        "bad_key": access.mint("live", bytes(32)),
        "private_key": funded["private_key"],
        "block": head,
        "topic": TOPIC,
        "revert": REVERTED,
        "no_hash": "0x" + "ab" * 32,
        "value": VALUE_WEI,
        "batches": [2, 100, 7, 31],
        "calls": list(calls(contracts, funded["address"])),
        "refusals": [*GETH, "known"],
    }


def calls(contracts: dict[str, str], account: str) -> Iterator[dict[str, Any]]:
    """The calls of the batches: large and small, fast and slow, successful and failing."""

    def call(method: str, *params: Any, succeeds: bool = True) -> dict[str, Any]:
        return {"method": method, "params": list(params), "succeeds": succeeds}

    yield call("eth_getBlockByNumber", "latest", True)
    yield call("eth_blockNumber")
    yield call("eth_nope", succeeds=False)
    yield call("eth_getBalance", account, "latest")
    yield call("eth_call", {"to": contracts["reverter"], "data": REVERTED}, "latest", succeeds=False)
    yield call("eth_getLogs", {"fromBlock": "0x0", "toBlock": "latest"})
    yield call("eth_chainId")
    yield call("eth_estimateGas", {"from": account, "to": contracts["logger"], "data": TOPIC})


async def reads(chain: Chain, task: dict[str, Any], account: str) -> dict[str, Any]:
    block = await chain.call("eth_getBlockByNumber", hex(task["block"]), True)
    fees = await chain.call("eth_feeHistory", "0x4", "latest", [25, 75])
    logs = await chain.call("eth_getLogs", {"address": task["logger"], "fromBlock": "0x0"})
    return {
        "chain_id": await chain.number("eth_chainId"),
        "block_number": await chain.number("eth_blockNumber"),
        "block": {
            "hash": block["hash"],
            "transactions": [[tx["hash"], int(tx["gas"], 16)] for tx in block["transactions"]],
        },
        "balance": await chain.number("eth_getBalance", account, "latest"),
        "nonce": await chain.number("eth_getTransactionCount", account, "latest"),
        "gas": await chain.number("eth_estimateGas", {"from": account, "to": task["logger"], "data": TOPIC}),
        "gas_price": await chain.number("eth_gasPrice"),
        "code": await chain.call("eth_getCode", task["logger"], "latest"),
        "fees": {
            "oldest": int(fees["oldestBlock"], 16),
            "base": [int(fee, 16) for fee in fees["baseFeePerGas"]],
            "reward": [[int(fee, 16) for fee in block] for block in fees["reward"]],
        },
        "logs": [[int(log["blockNumber"], 16), log["transactionHash"], log["topics"], log["data"]] for log in logs],
    }


def refusing(messages: Iterator[str]) -> Any:
    """An upstream that refuses every transaction, with the next message each time."""

    async def act(call: dict[str, object]) -> web.StreamResponse:
        if call["method"] == "eth_chainId":
            return reply(call, result=hex(FAR_CHAIN_ID))
        if call["method"] == "eth_sendRawTransaction":
            return reply(call, error={"code": -32000, "message": next(messages)})
        return await echo(call)

    return act


def test_reads_match_the_chain(run: Run) -> None:
    assert run.seen["reads"] == run.before
    assert run.before["logs"]
    if run.client == "web3.py":
        wanted = {"chain_id": 31337, "balance": run.before["balance"], "hash": run.before["block"]["hash"]}
        assert run.seen["asynchronous_reads"] == wanted


def test_every_reply_of_a_batch_matches_its_call(run: Run) -> None:
    calls = run.task["calls"]
    right = iter(run.results)
    wanted = [next(right) if call["succeeds"] else None for call in calls]
    for size, replies in zip(run.task["batches"], run.seen["batches"]["replies"], strict=True):
        assert len(replies) == size
        for at, found in enumerate(replies):
            match calls[at % len(calls)]["method"]:
                case "eth_nope":
                    assert found["rpc_code"] == -32601
                case "eth_call":
                    assert (found["rpc_code"], found["data"]) == (3, REVERTED)
                case _:
                    assert found == wanted[at % len(calls)]


def test_concurrent_calls_are_sent_as_one_batch(run: Run) -> None:
    if run.client == "web3.py":
        logs = len(run.before["logs"])
        assert run.seen["batches"]["typed"] == [[run.before["block"]["hash"], run.before["balance"], logs]] * 20
    else:
        assert run.seen["batches"]["sent"] == run.task["batches"]


async def test_transaction_is_sent_and_found(run: Run, chain: Chain) -> None:
    seen, before = run.seen["transaction"], run.before
    on_chain = await chain.call("eth_getTransactionByHash", seen["hash"])
    assert (on_chain["to"], int(on_chain["value"], 16)) == (run.task["recipient"], VALUE_WEI)
    assert seen["succeeded"]
    assert seen["value"] == VALUE_WEI
    assert seen["block"] == seen["found_in"] == int(on_chain["blockNumber"], 16) == before["block_number"] + 1
    assert seen["received"] == VALUE_WEI
    assert seen["left"] == before["balance"] - VALUE_WEI - seen["cost"]
    assert seen["nonce"] == before["nonce"] + 1


async def test_logs_of_a_transaction_are_found(run: Run, chain: Chain) -> None:
    of_receipt, found = run.seen["transaction"]["logs"]
    assert of_receipt == found
    ((sent, topics, data),) = found
    assert (topics, data) == ([TOPIC], TOPIC)
    on_chain = await chain.call("eth_getTransactionReceipt", sent)
    assert [log["topics"] for log in on_chain["logs"]] == [[TOPIC]]


def test_head_never_goes_backwards(run: Run) -> None:
    heads = run.seen["transaction"]["heads"]
    assert len(heads) == 22
    assert heads == sorted(heads)
    assert heads[0] == run.before["block_number"]
    assert heads[2:] == [heads[0] + 2] * 20


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_the_librarys_own_type(run: Run, name: str) -> None:
    error, wanted = run.seen["errors"][name], run.named(ERRORS[name])
    if wanted is None:
        assert error is None
        return
    assert wanted in error["types"]
    if name in DATA:
        assert error["data"] == DATA[name]
    if name in RPC_CODES:
        assert error["rpc_code"] == RPC_CODES[name]
    if name == "bad_key":
        assert error["status"] == 401


def test_reason_of_a_revert_is_read(run: Run) -> None:
    error = run.seen["errors"]["contract_revert"]
    assert "not today" in (error["message"] if run.client == "web3.py" else error["reason"])


@pytest.mark.parametrize("name", GETH)
def test_message_of_an_upstream_reaches_the_library(run: Run, name: str) -> None:
    message, names = GETH[name]
    error = run.seen["refusals"][name]
    assert run.named(names) in error["types"]
    assert error["rpc_code"] == -32000
    assert message in error["message"]


def test_already_known_transaction_counts_as_sent(run: Run) -> None:
    assert run.seen["refusals"]["known"] is True


def test_key_above_its_rate_limit_is_refused(run: Run) -> None:
    error = run.seen["limits"]["refused"]
    assert run.named(("HttpRequestError", "SERVER_ERROR", "HTTPError")) in error["types"]
    assert "rate limit exceeded" in error["message"]
    if run.client != "ethers":  # it turns the last 429 into a 599
        assert error["status"] == 429


def test_library_that_waits_gets_its_replies(run: Run) -> None:
    """More calls than the plan allows in a second: viem and web3.py wait by themselves, ethers by its `retryFunc`."""
    (price,) = set(run.seen["limits"]["got"])
    assert len(run.seen["limits"]["got"]) == 15
    assert price > 0


@pytest.mark.parametrize(("name", "count"), [("large", 80), ("many", 1000)])
def test_batch_above_the_rate_or_of_a_thousand_is_answered(run: Run, name: str, count: int) -> None:
    """ethers sends parallel calls as batches of up to 100 by default, viem with `batch: true` of up to 1,000."""
    (price,) = set(run.seen["limits"][name])
    assert len(run.seen["limits"][name]) == count
    assert price > 0


async def test_libraries_wait_for_the_rate_of_a_free_key(service: Service) -> None:
    """ethers sends calls at once as batches of up to 100, each in a request, and repeats only requests that got a 429. Each run
    has an account, as the rate is the account's."""
    keys = [(await service.new_key((await service.new_account("free"))["id"]))["key"] for _ in range(4)]
    task = {"url": f"{service.base}/rpc/dev/mainnet", "keys": keys}
    seen = await asyncio.to_thread(run_script, "rate_limited.mjs", task, within_s=RUN_S)
    assert seen == {
        "ethers, 99 calls": {"answered": 99, "errors": []},
        "ethers, 200 calls": {"answered": 200, "errors": []},
        "ethers, 150 balances": {"answered": 150, "errors": []},
        "viem, 200 balances": {"answered": 200, "errors": []},
    }
