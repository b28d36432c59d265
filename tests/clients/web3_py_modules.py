"""The tests that web3.py has for nodes, run twice each: against a chain directly and through the service.

It reads its task as JSON from standard input, and writes the outcome of each test for both ways as JSON to standard output.
Transactions are signed here, because the service has no accounts: by another account for each way, so that neither run sees
what the other has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import pytest_asyncio
from aiohttp import ClientTimeout
from eth_account import Account
from web3 import AsyncHTTPProvider, AsyncWeb3, HTTPProvider, Web3, WebSocketProvider
from web3._utils.contract_sources.contract_data.emitter_contract import EMITTER_CONTRACT_DATA
from web3._utils.contract_sources.contract_data.math_contract import MATH_CONTRACT_DATA
from web3._utils.contract_sources.contract_data.offchain_lookup import OFFCHAIN_LOOKUP_DATA
from web3._utils.contract_sources.contract_data.panic_errors_contract import PANIC_ERRORS_CONTRACT_DATA
from web3._utils.contract_sources.contract_data.revert_contract import REVERT_CONTRACT_DATA
from web3._utils.contract_sources.contract_data.storage_contract import STORAGE_CONTRACT_DATA
from web3._utils.module_testing.eth_module import AsyncEthModuleTest, EthModuleTest
from web3._utils.module_testing.go_ethereum_debug_module import (
    GoEthereumAsyncDebugModuleTest,
    GoEthereumDebugModuleTest,
)
from web3._utils.module_testing.go_ethereum_txpool_module import (
    GoEthereumAsyncTxPoolModuleTest,
    GoEthereumTxPoolModuleTest,
)
from web3._utils.module_testing.net_module import AsyncNetModuleTest, NetModuleTest
from web3._utils.module_testing.persistent_connection_provider import PersistentConnectionProviderTest
from web3._utils.module_testing.utils import RequestMocker
from web3._utils.module_testing.web3_module import AsyncWeb3ModuleTest, Web3ModuleTest
from web3.middleware import SignAndSendRawMiddlewareBuilder, Web3Middleware

WAYS = ("direct", "service")
REQUEST_S = 20
# A test that waits in vain is ended after this time.
TEST_S = 60
CONTRACTS: dict[str, Any] = {
    "math": MATH_CONTRACT_DATA,
    "emitter": EMITTER_CONTRACT_DATA,
    "revert": REVERT_CONTRACT_DATA,
    "offchain_lookup": OFFCHAIN_LOOKUP_DATA,
    "panic_errors": PANIC_ERRORS_CONTRACT_DATA,
    "storage": STORAGE_CONTRACT_DATA,
}


# Connections


def url_of(way: str, scheme: str) -> str:
    return str(TASK[way][scheme])


def headers_of(way: str) -> dict[str, str]:
    return {"Content-Type": "application/json", **TASK[way]["headers"]}


class LocalAccount(Web3Middleware):
    """Lists the account that signs here, as a wallet does."""

    def response_processor(self, method: Any, response: Any) -> Any:
        own = cast(Any, self._w3.eth).default_account
        return {**response, "result": [own]} if method == "eth_accounts" else response

    async def async_response_processor(self, method: Any, response: Any) -> Any:
        return self.response_processor(method, response)


def account_of(way: str) -> Any:
    return Account.from_key(TASK[way]["private_key"])


def signs(w3: Any, way: str) -> Any:
    """Sign the account's transactions here, and let every call be from it."""
    account = account_of(way)
    w3.eth.default_account = account.address
    w3.middleware_onion.inject(SignAndSendRawMiddlewareBuilder.build(account), layer=0)
    w3.middleware_onion.inject(LocalAccount, layer=0)
    return w3


def connect(way: str) -> Web3:
    options = {"timeout": REQUEST_S, "headers": headers_of(way)}
    return cast(Web3, signs(Web3(HTTPProvider(url_of(way, "http"), request_kwargs=options)), way))


@pytest.fixture(params=WAYS)
def w3(request: pytest.FixtureRequest) -> Web3:
    return connect(request.param)


@pytest_asyncio.fixture(params=WAYS)
async def async_w3(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    options = {"timeout": ClientTimeout(REQUEST_S), "headers": headers_of(request.param)}
    provider = AsyncHTTPProvider(url_of(request.param, "http"), request_kwargs=options)
    yield signs(AsyncWeb3(provider), request.param)
    await provider.disconnect()


class OverSocket:
    @pytest_asyncio.fixture(params=WAYS)
    async def async_w3(self, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
        found = await AsyncWeb3(WebSocketProvider(url_of(request.param, "ws"), request_timeout=REQUEST_S))
        yield signs(found, request.param)
        await found.provider.disconnect()


# What the tests find on the chain


class Deployed:
    """Contracts, blocks and transactions, made once."""

    def __init__(self, w3: Web3) -> None:
        self.addresses: dict[str, Any] = {}
        for name, data in CONTRACTS.items():
            receipt = self._sent(w3, w3.eth.contract(**data).constructor())
            self.addresses[name] = receipt["contractAddress"]
            if name == "math":
                self.math_deploy_txn_hash = receipt["transactionHash"]
        emitter = w3.eth.contract(address=self.addresses["emitter"], abi=EMITTER_CONTRACT_DATA["abi"])
        logged = self._sent(w3, emitter.functions.logDouble(which=9, arg0=12345, arg1=54321))
        self.txn_hash_with_log, self.block_hash_with_log = logged["transactionHash"], logged["blockHash"]
        w3.provider.make_request(cast(Any, "evm_mine"), [])
        self.empty_block_hash = w3.eth.get_block("latest")["hash"]
        mined = w3.eth.wait_for_transaction_receipt(
            w3.eth.send_transaction({"from": _own(w3), "to": _own(w3), "value": cast(Any, 1)})
        )
        self.mined_txn_hash, self.block_with_txn_hash = mined["transactionHash"], mined["blockHash"]

    def _sent(self, w3: Web3, call: Any) -> Any:
        return w3.eth.wait_for_transaction_receipt(call.transact({"from": _own(w3)}))


def _own(w3: Any) -> Any:
    return w3.eth.default_account


@pytest.fixture(scope="session")
def deployed() -> Deployed:
    return Deployed(connect("direct"))


@pytest.fixture
def keyfile_account_pkey(request: pytest.FixtureRequest) -> str:
    way = next(each for each in WAYS if each in request.node.name)
    return str(TASK[way]["private_key"])


keyfile_account_address = pytest.fixture(lambda w3: w3.eth.default_account)
keyfile_account_address_dual_type = pytest.fixture(lambda w3: w3.eth.default_account)
async_keyfile_account_address = pytest.fixture(lambda async_w3: async_w3.eth.default_account)
async_keyfile_account_address_dual_type = pytest.fixture(lambda async_w3: async_w3.eth.default_account)


@pytest.fixture
def math_contract_deploy_txn_hash(deployed: Deployed) -> Any:
    return deployed.math_deploy_txn_hash


@pytest.fixture
def mined_txn_hash(deployed: Deployed) -> Any:
    return deployed.mined_txn_hash


@pytest.fixture
def txn_hash_with_log(deployed: Deployed) -> Any:
    return deployed.txn_hash_with_log


@pytest.fixture
def empty_block(w3: Web3, deployed: Deployed) -> Any:
    return w3.eth.get_block(deployed.empty_block_hash)


@pytest.fixture
def block_with_txn(w3: Web3, deployed: Deployed) -> Any:
    return w3.eth.get_block(deployed.block_with_txn_hash)


@pytest.fixture
def block_with_txn_with_log(w3: Web3, deployed: Deployed) -> Any:
    return w3.eth.get_block(deployed.block_hash_with_log)


@pytest_asyncio.fixture
async def async_empty_block(async_w3: Any, deployed: Deployed) -> Any:
    return await async_w3.eth.get_block(deployed.empty_block_hash)


@pytest_asyncio.fixture
async def async_block_with_txn(async_w3: Any, deployed: Deployed) -> Any:
    return await async_w3.eth.get_block(deployed.block_with_txn_hash)


@pytest_asyncio.fixture
async def async_block_with_txn_with_log(async_w3: Any, deployed: Deployed) -> Any:
    return await async_w3.eth.get_block(deployed.block_hash_with_log)


@pytest.fixture
def skip_if_testrpc() -> Any:
    return lambda w3: None


@pytest.fixture
def async_skip_if_testrpc() -> Any:
    return lambda w3: None


@pytest.fixture
def request_mocker() -> type[RequestMocker]:
    return RequestMocker


def contract_fixture(name: str, *, is_async: bool, is_address: bool) -> Any:
    """The fixture of one contract, or of its address."""

    def found(w3: Any, deployed: Deployed) -> Any:
        contract = w3.eth.contract(address=deployed.addresses[name], abi=CONTRACTS[name]["abi"])
        return contract.address if is_address else contract

    if is_async:
        return pytest.fixture(lambda async_w3, deployed: found(async_w3, deployed))
    return pytest.fixture(lambda w3, deployed: found(w3, deployed))


for _name in CONTRACTS:
    for _prefix in ("", "async_"):
        _stem = f"{_prefix}{_name}_contract"
        vars()[_stem] = contract_fixture(_name, is_async=bool(_prefix), is_address=False)
        vars()[f"{_stem}_address"] = contract_fixture(_name, is_async=bool(_prefix), is_address=True)


# The tests


class AnyVersion:
    def _check_web3_client_version(self, client_version: str) -> None:
        assert client_version


class TestEth(EthModuleTest): ...


class TestWeb3(AnyVersion, Web3ModuleTest): ...  # type: ignore[misc]


class TestNet(NetModuleTest): ...


class TestDebug(GoEthereumDebugModuleTest): ...


class TestTxPool(GoEthereumTxPoolModuleTest): ...


class TestAsyncEth(AsyncEthModuleTest): ...


class TestAsyncWeb3(AnyVersion, AsyncWeb3ModuleTest): ...  # type: ignore[misc]


class TestAsyncNet(AsyncNetModuleTest): ...


class TestAsyncDebug(GoEthereumAsyncDebugModuleTest): ...


class TestAsyncTxPool(GoEthereumAsyncTxPoolModuleTest): ...


class TestSocketEth(OverSocket, AsyncEthModuleTest): ...


class TestSocketWeb3(OverSocket, AnyVersion, AsyncWeb3ModuleTest): ...  # type: ignore[misc]


class TestSocketNet(OverSocket, AsyncNetModuleTest): ...


class TestSocket(OverSocket, PersistentConnectionProviderTest):
    @pytest.fixture(autouse=True, scope="class")
    def blocks(self) -> Iterator[None]:
        """Mine all the time: these tests wait for new heads."""
        request = connect("direct").provider.make_request
        request(cast(Any, "evm_setIntervalMining"), [200])
        yield
        request(cast(Any, "evm_setIntervalMining"), [0])


# Outcomes


class Outcomes:
    """Records the outcome of each test by way, with the last line of its error."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        way = next((each for each in WAYS if f"{each}" in report.nodeid.partition("[")[2]), "")
        if not way or (report.when != "call" and report.passed):
            return
        name = report.nodeid.partition("::")[2].replace(f"{way}-", "").replace(f"-{way}", "").replace(f"[{way}]", "")
        outcome = report.outcome if report.passed else f"{report.outcome}: {_last_line(report)}"
        self.found.setdefault(name, {})[way] = outcome


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:500]


def main() -> None:
    outcomes = Outcomes()
    options = ["-c", os.devnull, "--rootdir", os.path.dirname(__file__), "-p", "no:cacheprovider"]
    given = [*options, "-q", "-W", "ignore", "--tb=short", "--timeout", str(TEST_S)]
    # The warnings of these tests are not ours to mend.
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main([*given, *TASK.get("options", []), __file__], plugins=[outcomes])
    json.dump(outcomes.found, sys.stdout)


TASK: dict[str, Any] = json.loads(os.environ["WEB3_MODULES_TASK"]) if __name__ != "__main__" else json.load(sys.stdin)
if __name__ == "__main__":
    os.environ["WEB3_MODULES_TASK"] = json.dumps(TASK)
    main()
