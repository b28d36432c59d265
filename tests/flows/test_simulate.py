"""Simulated transactions: over REST and by Alchemy's methods, on scripted upstreams; and on geth, compared with the chain after
the same transactions were sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from eth_abi.abi import decode, encode
from eth_account import Account
from web3 import Web3

from proxy.chains.evm.address import checksum
from proxy.core.access import AllowedUses
from proxy.dev.encoding import created_address, raw
from proxy.dev.funded_accounts import ALICE, BOB, CAROL, FUNDED, DevAccount
from proxy.dev.recipe import Artifact
from tests.chains.test_asset_changes import log, result
from tests.client_scripts import run_script
from tests.http_client import Reply, request
from tests.real_harness import RealHarness, real_harness
from tests.real_nodes import CHAIN_ID, PlannedBlock, RealNode, geth_nodes
from tests.rpc_harness import NetworkHarness, RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.shapes import conforms
from tests.web.worker import on_uvloop

ZERO = "0x" + 40 * "0"
SENDER, OTHER, TOKEN = ("0x" + 20 * each for each in ("aa", "bb", "cc"))
PAYMENT = {"from": SENDER, "to": OTHER, "value": "5"}
SIMULATED = "eth_simulateV1"


async def post(harness: NetworkHarness, path: str, body: Any, *, key: str = "main") -> Reply:
    async with await harness.worker.connect() as client:
        return await client.send(request("POST", f"/v1{path}", orjson.dumps(body), key=harness.worker.keys[key]))


async def simulated(harness: NetworkHarness, chain: str, transactions: list[Any], **body: Any) -> Any:
    reply = await post(harness, f"/simulate/{chain}", {"transactions": transactions, **body})
    assert reply.status == 200, reply
    found = conforms(reply.json, "Simulation")
    for each in found["transactions"]:
        conforms(each, "SimulatedTransaction")
        for name, shape in (("transfers", "SimulatedTransfer"), ("approvals", "SimulatedApproval")):
            for item in each[name]:
                conforms(item, shape)
    for each in found["balance_changes"]:
        conforms(each, "BalanceChange")
    return found


# Scripted upstreams


@asynccontextmanager
async def scripted_simulation(reply: bytes | Refused) -> AsyncIterator[RpcHarness]:
    """A worker with one upstream that returns this result, and tokens without a name."""

    def answer(_: list[Any]) -> Any:
        if isinstance(reply, Refused):
            raise reply
        return orjson.loads(reply)

    async with rpc_harness(1, rpc={"alchemy_methods": True}) as harness:
        harness.upstreams[0].answers |= {SIMULATED: answer, "eth_call": lambda _: "0x"}
        yield harness


MOVED = log("Transfer(address,address,uint256)", raw(SENDER), raw(OTHER), data=encode(["uint256"], [7]))


@on_uvloop
async def test_simulation_is_one_call_at_the_newest_block_and_paid_as_such() -> None:
    async with scripted_simulation(result([])) as harness:
        reply = await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT]})
        assert (reply.status, reply.headers["x-compute-units"]) == (200, "10")
        assert reply.headers["x-block-number"] == "5"
        (call,) = [each for each in harness.upstreams[0].calls if each.method == SIMULATED]
        asked = {"from": SENDER, "to": OTHER, "value": "0x5"}
        assert call.params[0]["blockStateCalls"] == [{"calls": [asked]}]
        assert call.params[0]["traceTransfers"] is True
        assert call.params[1] == hex(harness.chain.head)
        old = await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT], "block": "1"})
        assert old.headers["x-compute-units"] == "20"
        assert harness.upstreams[0].calls[-1].params[1] == "0x1"


@pytest.mark.parametrize(("count", "block", "units"), [(3, "latest", 30), (10, "latest", 100), (3, "1", 60)])
@on_uvloop
async def test_bundle_of_n_transactions_costs_n_times_as_much(count: int, block: str, units: int) -> None:
    (simulated_block,) = orjson.loads(result([]))
    simulated_block["calls"] *= count
    async with scripted_simulation(orjson.dumps([simulated_block])) as harness:
        reply = await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT] * count, "block": block})
        assert (reply.status, reply.headers["x-compute-units"]) == (200, str(units))
        again = await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT] * count, "block": block})
        assert again.headers["x-compute-units"] == "10"  # From the cache.
        for value, method in enumerate(("alchemy_simulateAssetChangesBundle", "alchemy_simulateExecutionBundle"), 6):
            given = [{**PAYMENT, "value": hex(value)}] * count
            found = await harness.call(method, [given, block if block == "latest" else hex(int(block))])
            assert ("result" in found.json, found.headers["x-compute-units"]) == (True, str(units)), found


@on_uvloop
async def test_descriptions_of_tokens_are_paid_for_once() -> None:
    async with scripted_simulation(result([MOVED])) as harness:
        costs = []
        for value in ("1", "2"):
            reply = await post(harness, "/simulate/ethereum", {"transactions": [{**PAYMENT, "value": value}]})
            costs.append(int(reply.headers["x-compute-units"]))
            (item,) = reply.json["transactions"][0]["transfers"]
            assert (item["value"], item["symbol"], item["formatted_value"]) == ("7", None, None)
        assert costs[0] > costs[1] == 10


LACKS = Refused(-32601, f"the method {SIMULATED} does not exist/is not available")


@on_uvloop
async def test_network_without_the_method_is_a_clear_error() -> None:
    async with scripted_simulation(LACKS) as harness:
        error = (await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT]})).fault(404)
        assert SIMULATED in error["message"]
        assert error["reason"] == "network"
        asked = {**PAYMENT, "value": "0x5"}
        for method, params in (
            ("alchemy_simulateAssetChanges", [asked]),
            ("alchemy_simulateAssetChangesBundle", [[asked]]),
            ("alchemy_simulateExecution", [asked]),
            ("alchemy_simulateExecutionBundle", [[asked]]),
        ):
            refused = (await harness.call(method, params)).json["error"]
            assert (refused["code"], SIMULATED in refused["message"]) == (-32601, True)


@on_uvloop
async def test_transactions_that_nodes_refuse_are_a_400_with_the_reason() -> None:
    refusal = Refused(-38014, "err: insufficient funds for gas * price + value: have 0 want 5")
    async with scripted_simulation(refusal) as harness:
        error = (await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT]})).fault(400)
        assert "insufficient funds" in error["message"]
        refused = await harness.call("alchemy_simulateAssetChanges", [{**PAYMENT, "value": "0x5"}])
        assert "insufficient funds" in refused.json["error"]["message"]


@pytest.mark.parametrize("reply", [b"null", b"[]", b'[{"number": "0x6", "calls": []}]'])
@on_uvloop
async def test_result_that_is_none_is_no_answer(reply: bytes) -> None:
    """It is paid for: the upstream has worked."""
    async with scripted_simulation(reply) as harness:
        refused = await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT]})
        refused.fault(503)
        assert refused.headers["x-compute-units"] == "10"
        refused = await harness.call("alchemy_simulateAssetChanges", [{**PAYMENT, "value": "0x6"}])
        refused.fault(503)
        assert refused.headers["x-compute-units"] == "10"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"transactions": []}, "transactions"),
        ({"transactions": [PAYMENT] * 11}, "transactions"),
        ({"transactions": [{**PAYMENT, "value": "0x5"}]}, "value"),
        ({"transactions": [{**PAYMENT, "value": str(2**256)}]}, "value"),
        ({"transactions": [{**PAYMENT, "data": "0x1"}]}, "data"),
        ({"transactions": [{**PAYMENT, "data": "0x" + "00" * 16_385}]}, "data"),
        ({"transactions": [{**PAYMENT, "gas": 1}]}, "gas"),
        ({"transactions": [{**PAYMENT, "to": "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAeD"}]}, "to"),
        ({"transactions": [{**PAYMENT, "nonce": 1}]}, "nonce"),
        ({"transactions": [PAYMENT], "block": "newest"}, "block"),
        ({"transactions": [PAYMENT], "overrides": {}}, "overrides"),
    ],
)
@on_uvloop
async def test_bad_member_is_named(body: Any, param: str) -> None:
    async with scripted_simulation(result([])) as harness:
        error = (await post(harness, "/simulate/ethereum", body)).fault(400)
        assert param in error["message"]
        assert not harness.count(SIMULATED)


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("alchemy_simulateAssetChanges", [], "params"),
        ("alchemy_simulateAssetChanges", [{"to": OTHER, "code": "0x"}], "params[0].code"),
        ("alchemy_simulateAssetChanges", [{"to": OTHER, "x" * 5000: "0x"}], f"params[0].{'x' * 64}"),
        ("alchemy_getAssetTransfers", [{"x" * 5000: "0x"}], "x" * 64),
        ("alchemy_simulateAssetChanges", [{"to": OTHER}, 5], "params[1]"),
        ("alchemy_simulateAssetChangesBundle", [{"to": OTHER}], "params"),
        ("alchemy_simulateAssetChangesBundle", [[]], "params[0]"),
        ("alchemy_simulateAssetChangesBundle", [[{"to": OTHER}] * 11], "params[0]"),
        ("alchemy_simulateAssetChangesBundle", [[{"to": OTHER}, {"to": 5}]], "params[0][1].to"),
        ("alchemy_simulateExecution", [{"to": OTHER}, "latest", {"traceOptions": {"format": "TREE"}}], "params[2]"),
        ("alchemy_simulateExecutionBundle", [{"to": OTHER}], "params"),
        ("alchemy_simulateExecutionBundle", [[]], "params[0]"),
        ("alchemy_simulateExecutionBundle", [[{"to": OTHER}, {"to": 5}]], "params[0][1].to"),
        ("alchemy_simulateExecutionBundle", [[{"to": OTHER}], "latest", []], "params[2]"),
        ("alchemy_simulateExecution", [{"to": OTHER}, "latest", 5], "params[2]"),
    ],
)
@on_uvloop
async def test_bad_params_are_named(method: str, params: list[Any], named: str) -> None:
    async with scripted_simulation(result([])) as harness:
        error = (await harness.call(method, params)).json["error"]
        assert (error["code"], error["message"].split(": ")[0]) == (-32602, named)


@on_uvloop
async def test_key_that_is_limited_to_contracts_simulates_only_calls_to_them() -> None:
    async with scripted_simulation(result([])) as harness:
        harness.worker.add_key("limited", uses=AllowedUses(contracts=frozenset({TOKEN})))
        allowed = {"from": SENDER, "to": TOKEN}
        good = await post(harness, "/simulate/ethereum", {"transactions": [allowed]}, key="limited")
        assert good.status == 200, good
        for other in ([allowed, PAYMENT], [{"from": SENDER, "data": "0x"}]):
            (await post(harness, "/simulate/ethereum", {"transactions": other}, key="limited")).fault(403)
        reply = await harness.call("alchemy_simulateAssetChanges", [allowed], key="limited")
        assert "result" in reply.json, reply
        assert (await harness.call("alchemy_simulateAssetChanges", [{"to": OTHER}], key="limited")).status == 403


@on_uvloop
async def test_key_without_reads_cannot_simulate() -> None:
    async with scripted_simulation(result([])) as harness:
        harness.worker.add_key("data", scopes=["data:read"])
        (await post(harness, "/simulate/ethereum", {"transactions": [PAYMENT]}, key="data")).fault(403)


@on_uvloop
async def test_other_families_cannot_simulate() -> None:
    async with rpc_harness(1, network="solana/mainnet") as harness:
        error = (await post(harness, "/simulate/solana", {"transactions": [PAYMENT]})).fault(404)
        assert "simulated" in error["message"]


# Geth

PEOPLE = (ALICE, BOB, CAROL)
HOLDERS = [each.address for each in (*PEOPLE, FUNDED)]
FAR = "0x000000000000000000000000000000000000dEaD"
IDS = range(1, 7)
COUNT = 200
PRICE = 2 * 10**9
ETHER = 10**18
TRANSFER, SINGLE, BATCH, DEPOSIT, WITHDRAWAL, APPROVAL, FOR_ALL = (
    Web3.keccak(text=signature).hex()
    for signature in (
        "Transfer(address,address,uint256)",
        "TransferSingle(address,address,address,uint256,uint256)",
        "TransferBatch(address,address,address,uint256[],uint256[])",
        "Deposit(address,uint256)",
        "Withdrawal(address,uint256)",
        "Approval(address,address,uint256)",
        "ApprovalForAll(address,address,bool)",
    )
)


def calldata(signature: str, *values: Any) -> bytes:
    types = signature.partition("(")[2].removesuffix(")")
    return bytes(Web3.keccak(text=signature)[:4]) + encode(_split(types), values)


def _split(types: str) -> list[str]:
    """The types of arguments; those of the one tuple that is used stay together."""
    return [types] if types.startswith("(") else types.split(",") if types else []


class Shop:
    """A chain with contracts, and random transactions on them."""

    def __init__(self, harness: RealHarness, rng: random.Random) -> None:
        self.harness = harness
        self.node = harness.nodes[0]
        self.rng = rng
        self.number = 0
        self.nonces: dict[str, int] = {}
        self.coins: list[str] = []
        self.pictures = self.items = self.wrapped = self.many = ""

    async def open(self) -> None:
        self.number = int(await self.node.ask("eth_blockNumber"), 16)
        for each in (FUNDED, *PEOPLE):
            self.nonces[each.address] = int(await self.node.ask("eth_getTransactionCount", each.address, "latest"), 16)
        made = [
            self._create("Coin", "Penstock Token", "PEN", 18),
            self._create("Coin", "Dev Dollar", "DUSD", 6),
            self._create("Pictures"),
            self._create("Items", "Penstock Items", "ITEM", "ipfs://x"),
            self._create("WrappedEther"),
            self._create("Multicall3"),
        ]
        *self.coins, self.pictures, self.items, self.wrapped, self.many = [address for address, _ in made]
        self.coins.append(self.wrapped)
        sent = [transaction for _, transaction in made]
        sent += [self.signed(FUNDED, {"to": person.address, "value": 200 * ETHER}) for person in PEOPLE]
        for contract in self.coins[:2]:
            sent += [
                self.signed(FUNDED, {"to": contract, "data": calldata("mint(address,uint256)", person.address, 10**9)})
                for person in PEOPLE
            ]
        assert all(each["status"] == "0x1" for each in await self.mine(sent))

    def _create(self, artifact: str, *values: Any) -> tuple[str, tuple[str, str]]:
        address = created_address(FUNDED.address, self.nonces[FUNDED.address])
        return address, self.signed(FUNDED, {"data": Artifact.named(artifact).with_arguments(*values)})

    def signed(self, sender: DevAccount, fields: dict[str, Any]) -> tuple[str, str]:
        nonce = self.nonces[sender.address]
        self.nonces[sender.address] = nonce + 1
        whole = {"chainId": CHAIN_ID, "nonce": nonce, "gas": 5_000_000, "gasPrice": PRICE, "value": 0, **fields}
        found = Account.sign_transaction(whole, sender.private_key)
        return found.raw_transaction.to_0x_hex(), found.hash.to_0x_hex()

    async def mine(self, sent: list[tuple[str, str]]) -> list[dict[str, Any]]:
        """Send the transactions in one block, and return their receipts."""
        self.number += 1
        await self.node.extend(PlannedBlock(self.number, "0x" + "99" * 20, tuple(sent)))
        await self.harness.look()
        return [await self.node.ask("eth_getTransactionReceipt", name) for _, name in sent]

    # Random transactions

    def random_transaction(self) -> tuple[DevAccount, dict[str, Any]]:
        rng = self.rng
        sender = rng.choice(PEOPLE)
        kind = rng.choice((self._coins, self._token, self._token, self._picture, self._item, self._wrap, self._mixed))
        return sender, kind(sender.address)

    def _other(self) -> str:
        return self.rng.choice((*HOLDERS, FAR))

    def _coins(self, _: str) -> dict[str, Any]:
        # Pictures takes no coins: such a payment fails.
        to = self.rng.choice((*HOLDERS, FAR, self.wrapped, self.pictures))
        return {"to": to, "value": self.rng.choice((0, 1, 10**15, ETHER))}

    def _token(self, sender: str) -> dict[str, Any]:
        rng, other, third = self.rng, self._other(), self._other()
        amount = rng.choice((0, 1, 10**6, 3 * 10**8, 10**30))
        signature, values = rng.choice(
            (
                ("transfer(address,uint256)", (other, amount)),
                ("approve(address,uint256)", (other, rng.choice((0, amount, 2**256 - 1)))),
                ("transferFrom(address,address,uint256)", (other, third, amount)),
                ("mint(address,uint256)", (other, amount)),
                ("burn(uint256)", (amount,)),
            )
        )
        return {"to": rng.choice(self.coins), "data": calldata(signature, *values)}

    def _picture(self, sender: str) -> dict[str, Any]:
        rng, other, token = self.rng, self._other(), self.rng.choice(IDS)
        signature, values = rng.choice(
            (
                ("mint(address,uint256,string)", (sender, token, "ipfs://x")),
                ("transferFrom(address,address,uint256)", (sender, other, token)),
                ("transferFrom(address,address,uint256)", (other, sender, token)),
                ("approve(address,uint256)", (rng.choice((other, ZERO)), token)),
                ("setApprovalForAll(address,bool)", (other, rng.random() < 0.7)),
                ("burn(uint256)", (token,)),
            )
        )
        return {"to": self.pictures, "data": calldata(signature, *values)}

    def _item(self, sender: str) -> dict[str, Any]:
        rng, other = self.rng, self._other()
        ids = rng.sample(IDS, k=3)
        amounts = [rng.choice((0, 1, 5, 100)) for _ in ids]
        signature, values = rng.choice(
            (
                ("mint(address,uint256,uint256)", (other, ids[0], amounts[0])),
                ("mintBatch(address,uint256[],uint256[])", (sender, ids, amounts)),
                ("safeTransferFrom(address,address,uint256,uint256,bytes)", (sender, other, ids[0], amounts[0], b"")),
                (
                    "safeBatchTransferFrom(address,address,uint256[],uint256[],bytes)",
                    (sender, other, ids, amounts, b""),
                ),
                ("setApprovalForAll(address,bool)", (other, rng.random() < 0.7)),
                ("burn(uint256,uint256)", (ids[0], amounts[0])),
            )
        )
        return {"to": self.items, "data": calldata(signature, *values)}

    def _wrap(self, _: str) -> dict[str, Any]:
        amount = self.rng.choice((0, 10**15, ETHER))
        if self.rng.random() < 0.6:
            return {"to": self.wrapped, "value": amount, "data": calldata("deposit()")}
        return {"to": self.wrapped, "data": calldata("withdraw(uint256)", amount)}

    def _mixed(self, sender: str) -> dict[str, Any]:
        """Several calls by a contract, which moves coins too. Each may fail alone."""
        rng = self.rng
        calls, value = [], 0
        for _ in range(rng.randrange(1, 5)):
            made = rng.choice((self._coins, self._token, self._picture, self._item, self._wrap))(sender)
            value += made.get("value", 0)
            calls.append((made["to"], True, made.get("value", 0), made.get("data", b"")))
        spare = rng.choice((0, 0, 3))
        data = calldata("aggregate3Value((address,bool,uint256,bytes)[])", calls)
        # The contract requires exactly what its calls need: with more, it reverts.
        return {"to": self.many, "value": value + spare, "data": data}

    # What the chain shows

    async def balances(self) -> dict[tuple[str, str, str | None], int]:
        """By holder, contract and token id; coins are under no contract."""
        holders = [*HOLDERS, FAR, *self.coins, self.pictures, self.items, self.many]
        asked: dict[tuple[str, str, str | None], tuple[str, list[Any]]] = {}
        for holder in holders:
            asked[holder, "", None] = ("eth_getBalance", [holder, "latest"])
            for coin in self.coins:
                asked[holder, coin, None] = _view(coin, "balanceOf(address)", holder)
            for token in IDS:
                asked[holder, self.items, str(token)] = _view(self.items, "balanceOf(address,uint256)", holder, token)
        found = {place: int(reply["result"], 16) for place, reply in (await self._ask_all(asked)).items()}
        owners = {token: _view(self.pictures, "ownerOf(uint256)", token) for token in IDS}
        for token, reply in (await self._ask_all(owners)).items():
            owner = checksum(raw(reply["result"])[12:]) if "result" in reply else ""
            found |= {(holder, self.pictures, str(token)): int(holder == owner) for holder in holders}
        return found

    async def _ask_all(self, asked: dict[Any, tuple[str, list[Any]]]) -> dict[Any, Any]:
        assert self.node.session is not None
        body = [{"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate(asked.values())]
        async with self.node.session.post(self.node.url, json=body) as response:
            replies = {each["id"]: each for each in await response.json()}
        return {place: replies[n] for n, place in enumerate(asked)}

    async def read(self, contract: str, signature: str, *values: Any) -> int:
        return int(await self.node.ask(*_flat(_view(contract, signature, *values))), 16)


def _view(contract: str, signature: str, *values: Any) -> tuple[str, list[Any]]:
    return "eth_call", [{"to": contract, "data": "0x" + calldata(signature, *values).hex()}, "latest"]


def _flat(call: tuple[str, list[Any]]) -> tuple[Any, ...]:
    return (call[0], *call[1])


def moved_by(receipt: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The transfers of tokens in a receipt: category, contract, from, to, token id, amount."""
    found: list[tuple[Any, ...]] = []
    for each in receipt["logs"]:
        name, *topics = [topic[2:] for topic in each["topics"]]
        people = [checksum(raw(topic)[12:]) for topic in topics]
        contract, data = checksum(raw(each["address"])), raw(each["data"])
        if name == TRANSFER and len(topics) == 2:
            found.append(("erc20", contract, *people, None, *decode(["uint256"], data)))
        elif name == TRANSFER:
            found.append(("erc721", contract, *people[:2], str(int(topics[2], 16)), 1))
        elif name == SINGLE:
            token, amount = decode(["uint256", "uint256"], data)
            found.append(("erc1155", contract, *people[1:], str(token), amount))
        elif name == BATCH:
            pairs = zip(*decode(["uint256[]", "uint256[]"], data), strict=True)
            found += [("erc1155", contract, *people[1:], str(token), amount) for token, amount in pairs]
        elif name == DEPOSIT:
            found.append(("erc20", contract, ZERO, people[0], None, *decode(["uint256"], data)))
        elif name == WITHDRAWAL:
            found.append(("erc20", contract, people[0], ZERO, None, *decode(["uint256"], data)))
    return found


def approved_by(receipt: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The approvals in a receipt: contract, owner, spender, token id, amount, whether it is for all."""
    found: list[tuple[Any, ...]] = []
    for each in receipt["logs"]:
        name, *topics = [topic[2:] for topic in each["topics"]]
        people = [checksum(raw(topic)[12:]) for topic in topics]
        contract, data = checksum(raw(each["address"])), raw(each["data"])
        if name == APPROVAL and len(topics) == 2:
            found.append((contract, *people, None, str(*decode(["uint256"], data)), False, None))
        elif name == APPROVAL:
            found.append((contract, *people[:2], str(int(topics[2], 16)), None, False, people[1] != ZERO))
        elif name == FOR_ALL:
            found.append((contract, *people, None, None, True, *decode(["bool"], data)))
    return found


def shown_transfers(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (each["category"], each["contract"], each["from"], each["to"], each["token_id"], int(each["value"]))
        for each in found["transfers"]
        if each["category"] != "native"
    ]


def shown_approvals(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            *(each[name] for name in ("contract", "owner", "spender", "token_id", "value", "for_all")),
            None if each["standard"] == "ERC20" else each["approved"],
        )
        for each in found["approvals"]
    ]


def as_rest(sender: DevAccount, fields: dict[str, Any]) -> dict[str, Any]:
    data = {"data": "0x" + fields["data"].hex()} if "data" in fields else {}
    return {"from": sender.address, "to": fields["to"], "value": str(fields.get("value", 0)), "gas": 5_000_000, **data}


def as_rpc(asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "value": hex(int(asked["value"])), "gas": hex(asked["gas"])}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealNode]]:
    with geth_nodes(1, tmp_path_factory.mktemp("nodes")) as found:
        yield found


@on_uvloop
async def test_random_transactions_change_what_their_simulation_said(nodes: list[RealNode]) -> None:
    rng = random.Random(35)
    async with real_harness(nodes, rpc={"alchemy_methods": True}) as harness:
        shop = Shop(harness, rng)
        await shop.open()
        before, done, kinds = await shop.balances(), 0, set[str]()
        while done < COUNT:
            asked = [shop.random_transaction() for _ in range(min(rng.randrange(1, 5), COUNT - done))]
            given = [as_rest(*each) for each in asked]
            found = await simulated(harness, "dev", given)
            assert found["block_number"] == shop.number
            changes = await harness.result("alchemy_simulateAssetChangesBundle", [[*map(as_rpc, given)]])
            receipts = await shop.mine([shop.signed(*each) for each in asked])
            fees: dict[str, int] = {}
            for one, alchemys, receipt in zip(found["transactions"], changes, receipts, strict=True):
                check_receipt(one, alchemys, receipt)
                kinds |= {one["status"], *(each["category"] for each in one["transfers"])}
                kinds |= {f"{each['standard']} {each['for_all']}" for each in one["approvals"]}
                payer = checksum(raw(receipt["from"]))
                fees[payer] = fees.get(payer, 0) + int(receipt["gasUsed"], 16) * PRICE
            after = await shop.balances()
            expected = {
                place: change
                for place, amount in after.items()
                if (change := amount - before[place] + (fees.get(place[0], 0) if not place[1] else 0))
            }
            assert net(found) == expected, (given, found)
            await check_approvals(shop, found)
            before, done = after, done + len(asked)
        approvals = {"ERC20 False", "ERC721 False", "ERC721 True", "ERC1155 True"}
        assert kinds == {"success", "failed", "native", "erc20", "erc721", "erc1155", *approvals}


def net(found: dict[str, Any]) -> dict[tuple[str, str, str | None], int]:
    return {
        (each["address"], each["contract"] or "", each["token_id"]): int(each["change"])
        for each in found["balance_changes"]
    }


def check_receipt(one: dict[str, Any], alchemys: dict[str, Any], receipt: dict[str, Any]) -> None:
    assert (one["status"] == "success") == (receipt["status"] == "0x1"), (one, receipt)
    assert one["gas_used"] == int(alchemys["gasUsed"], 16) == int(receipt["gasUsed"], 16), (one, receipt)
    assert shown_transfers(one) == moved_by(receipt), (one, receipt)
    assert shown_approvals(one) == approved_by(receipt), (one, receipt)
    assert (one["error"] is None) == (alchemys["error"] is None) == (one["status"] == "success")
    moves = [each for each in alchemys["changes"] if each["changeType"] == "TRANSFER"]
    assert [
        (each["assetType"].lower(), each["from"], each["to"], each["rawAmount"], each["tokenId"]) for each in moves
    ] == [
        (each["category"], each["from"].lower(), each["to"].lower(), each["value"], each["token_id"])
        for each in one["transfers"]
    ]
    allowed = [each for each in alchemys["changes"] if each["changeType"] == "APPROVE"]
    assert [
        (each["assetType"], each["from"], each["to"], each["rawAmount"] != "0", each["tokenId"]) for each in allowed
    ] == [
        (each["standard"], each["owner"].lower(), each["spender"].lower(), each["approved"], each["token_id"])
        for each in one["approvals"]
    ]


async def check_approvals(shop: Shop, found: dict[str, Any]) -> None:
    """The last approval of each kind is what the contract returns now, unless it was used or its token has moved since."""
    last: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    for at, one in enumerate(found["transactions"]):
        for each in one["approvals"]:
            last[each["contract"], each["owner"], each["spender"], each["token_id"], each["for_all"]] = (at, each)
    for at, each in last.values():
        later = found["transactions"][at:]
        if any(move["contract"] == each["contract"] for one in later for move in one["transfers"]):
            continue
        contract, owner, spender = each["contract"], each["owner"], each["spender"]
        if each["for_all"]:
            is_approved = await shop.read(contract, "isApprovedForAll(address,address)", owner, spender)
            assert bool(is_approved) == each["approved"]
        elif each["standard"] == "ERC20":
            assert await shop.read(contract, "allowance(address,address)", owner, spender) == int(each["value"])


@on_uvloop
async def test_execution_lists_the_calls_and_logs_of_a_transaction(nodes: list[RealNode]) -> None:
    async with real_harness(nodes, rpc={"alchemy_methods": True}) as harness:
        shop = Shop(harness, random.Random(1))
        await shop.open()
        paid = calldata("aggregate3Value((address,bool,uint256,bytes)[])", [(BOB.address, False, 5, b"")])
        asked = {"from": ALICE.address, "to": shop.many, "value": "0x5", "data": "0x" + paid.hex()}
        found = await harness.result(
            "alchemy_simulateExecution", [asked, "latest", {"traceOptions": {"format": "FLAT"}}]
        )
        inner = [(each["type"], each["from"], each["to"], each["value"]) for each in found["calls"]]
        many, alice, bob = shop.many.lower(), ALICE.address.lower(), BOB.address.lower()
        assert inner == [("CALL", alice, many, "0x5"), ("CALL", many, bob, "0x5")]
        assert found["logs"] == []
        burnt = calldata("burn(uint256)", 10**40)
        asked = {"from": ALICE.address, "to": shop.coins[0], "data": "0x" + burnt.hex()}
        error = (await harness.result("alchemy_simulateAssetChanges", [asked]))["error"]["message"]
        assert "ERC20InsufficientBalance" in error
        found = await simulated(harness, "dev", [{**asked}])
        assert found["transactions"][0]["error"]["reason"].startswith(f"ERC20InsufficientBalance({ALICE.address}, ")


@on_uvloop
async def test_sdk_of_alchemy_simulates(nodes: list[RealNode]) -> None:
    async with real_harness(nodes, rpc={"alchemy_methods": True}) as harness:
        shop = Shop(harness, random.Random(2))
        await shop.open()
        transfer = calldata("transfer(address,uint256)", BOB.address, 1_500_000)
        approve = calldata("setApprovalForAll(address,bool)", BOB.address, True)
        base = {"from": ALICE.address, "value": "0x0"}
        task = {
            "url": f"http://127.0.0.1:{harness.worker.port}/v1/rpc/{harness.network}",
            "key": harness.worker.keys["main"],
            "transfer": {**base, "to": shop.coins[1], "data": "0x" + transfer.hex()},
            "approve": {**base, "to": shop.items, "data": "0x" + approve.hex()},
            "fails": {**base, "to": shop.items, "data": "0x" + transfer.hex()},
        }
        seen = await asyncio.to_thread(run_script, "alchemy_simulation.mjs", task, within_s=60.0)
        (moved,) = seen["transfer"]["changes"]
        assert (moved["assetType"], moved["changeType"], moved["symbol"]) == ("ERC20", "TRANSFER", "DUSD")
        assert (moved["rawAmount"], moved["amount"], moved["decimals"]) == ("1500000", "1.5", 6)
        assert moved["contractAddress"] == shop.coins[1].lower()
        assert "error" not in seen["transfer"]
        (_, approved, failed) = seen["bundle"]
        assert [(each["assetType"], each["changeType"]) for each in approved["changes"]] == [("ERC1155", "APPROVE")]
        assert (failed["changes"], "reverted" in failed["error"]["message"]) == ([], True)
        assert [each["address"] for each in seen["execution"]["logs"]] == [shop.coins[1].lower()]
        assert [each["type"] for each in seen["execution"]["calls"]] == ["CALL"]


@on_uvloop
async def test_execution_without_traces_has_the_transaction_itself() -> None:
    async with scripted_simulation(result([MOVED], returnData="0x01")) as harness:

        def lacks(_: list[Any]) -> Any:
            raise Refused(-32601, "the method debug_traceCall does not exist/is not available")

        harness.upstreams[0].answers["debug_traceCall"] = lacks
        found = await harness.result("alchemy_simulateExecution", [{"from": SENDER, "to": TOKEN, "data": "0x12"}])
        (call,) = found["calls"]
        assert (call["type"], call["to"], call["input"], call["output"]) == ("CALL", TOKEN, "0x12", "0x01")
        assert [each["address"] for each in found["logs"]] == [TOKEN]
        asked = [{"from": SENDER, "to": TOKEN, "data": "0x12"}]
        assert await harness.result("alchemy_simulateExecutionBundle", [asked]) == [found]


@on_uvloop
async def test_execution_shows_calls_flat_or_nested() -> None:
    def call(name: str, *inner: Any) -> dict[str, Any]:
        return {"type": "CALL", "from": SENDER, "to": TOKEN, "input": name, **({"calls": [*inner]} if inner else {})}

    tree = call("0x", call("0x01", call("0x0101"), call("0x0102")), call("0x02"))

    async def names(harness: RpcHarness, form: str) -> Any:
        asked = [{"from": SENDER, "to": TOKEN}, "latest", {"traceOptions": {"format": form}}]
        return (await harness.result("alchemy_simulateExecution", asked))["calls"]

    async with scripted_simulation(result([MOVED])) as harness:
        harness.upstreams[0].answers["debug_traceCall"] = lambda _: tree
        assert await names(harness, "NESTED") == [tree]
        flat = await names(harness, "FLAT")
        assert [each["input"] for each in flat] == ["0x", "0x01", "0x0101", "0x0102", "0x02"]
        assert all("calls" not in each for each in flat)
        deep = call("0x")
        for _ in range(121):
            deep = call("0x", deep)
        harness.upstreams[0].answers["debug_traceCall"] = lambda _: deep
        # Another transaction: the trace of the first one is cached.
        asked = [{"from": SENDER, "to": TOKEN, "data": "0x12"}, "latest", {"traceOptions": {"format": "NESTED"}}]
        error = (await harness.call("alchemy_simulateExecution", asked)).json["error"]
        assert "use the format FLAT" in error["message"]
