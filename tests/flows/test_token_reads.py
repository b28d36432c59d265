"""Token reads against a real database and scripted contracts: results, and the number of upstream calls they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import eth_abi
import pytest
from aiohttp import web

from proxy.chains.evm import abi, ens
from proxy.chains.evm.address import checksum
from proxy.services.tokens import evm_tokens, token_contracts
from tests.contract_upstreams import CALL_GAS, Contract, Machine, Reverted, answering, burning
from tests.database import connected
from tests.http_client import Reply, request
from tests.rpc_harness import RpcHarness, rpc_harness
from tests.rpc_upstreams import Refused
from tests.service import until
from tests.shapes import conforms
from tests.shipped_tables import TABLES
from tests.web.worker import LIVE, on_uvloop

HOLDER = b"\xaa" * 20


def contract(number: int) -> bytes:
    return (0xC000 + number).to_bytes(20, "big")


class Reads:
    def __init__(self, harness: RpcHarness, machine: Machine, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self.harness = harness
        self.machine = machine
        self.database = connection

    async def get(self, path: str) -> Reply:
        async with await self.harness.worker.connect() as client:
            return await client.send(request("GET", f"/v1{path}", key=self.harness.worker.keys["main"]))

    async def balances(self, holder: bytes = HOLDER, query: str = "?limit=100", network: str = "ethereum") -> Any:
        reply = await self.get(f"/tokens/{network}/balances/{checksum(holder)}{query}")
        assert reply.status == 200, reply
        return conforms(reply.json, "TokenBalanceList")

    @property
    def requests(self) -> int:
        """Requests to the upstream so far. No head tracker runs here, so all of them are for reads."""
        return self.harness.upstreams[0].requests

    async def hold(self, contracts: Iterable[bytes], holder: bytes = HOLDER, *, amount: int = 1) -> None:
        rows = [(1, holder, each, amount) for each in contracts]
        await self.database.copy_records_to_table("token_holdings", records=rows)

    async def index(self, block: int) -> None:
        await self.database.execute("update followed_networks set block = $1", block)

    async def move(self, block: int) -> None:
        """Move chain and index to this block, and wait until replies are of it."""
        self.harness.chain.head = block
        await self.harness.look()
        await self.index(block)

        async def is_there() -> bool:
            return bool((await self.balances())["as_of_block"] == block)

        await until(is_there)


@asynccontextmanager
async def reads(url: str, *, indexed: int | None = 1000, **sections: Any) -> AsyncIterator[Reads]:
    """A worker on this database, with its network indexed up to a block."""
    machine = Machine()
    # On a busy machine Postgres may take longer than requests wait by default.
    settings = {"url": url, "acquire_timeout_s": 30.0, "request_timeout_s": 30.0}
    async with connected(url) as connection, rpc_harness(1, network=LIVE, database=settings, **sections) as harness:
        harness.upstreams[0].answers["eth_call"] = machine.call
        await harness.worker.app.pool.open()
        await until(harness.worker.app.pool.is_up)
        if indexed is not None:
            await connection.execute(
                "insert into followed_networks (network, first_block, block, block_hash) values ($1, 0, $2, '')",
                LIVE,
                indexed,
            )
        yield Reads(harness, machine, connection)


@on_uvloop
async def test_five_hundred_tokens_cost_two_upstream_calls_and_then_one(database: str) -> None:
    async with reads(database) as api:
        for n in range(500):
            api.machine.token(contract(n), n + 1, f"Coin {n}", f"C{n:03}", n % 30)
        await api.hold(map(contract, range(500)))
        before = api.requests
        first = await api.balances()
        assert first["total"] == 500
        assert [t["symbol"] for t in first["tokens"]] == [f"C{n:03}" for n in range(100)]
        assert api.requests - before == 2
        assert api.machine.sizes == [500, 1500]
        assert set(api.machine.blocks) == {hex(1000)}
        for page in range(1, 6):
            assert len((await api.balances(query=f"?limit=100&page={page}"))["tokens"]) == 100
        assert api.requests - before == 2  # all pages are cut from one list
        api.harness.chain.head += 1
        await api.harness.look()
        await api.index(1001)
        before = api.requests

        async def is_newer() -> bool:
            return bool((await api.balances())["as_of_block"] == 1001)

        await until(is_newer)
        assert api.requests - before == 1  # names are cached by now


@on_uvloop
async def test_balances_are_read_at_the_block_of_the_index(database: str) -> None:
    async with reads(database, indexed=950) as api:
        api.machine.token(contract(1), 5)
        await api.hold([contract(1)])
        assert (await api.balances())["as_of_block"] == 950
        assert set(api.machine.blocks) == {hex(950)}


@on_uvloop
async def test_balances_wait_for_the_block_that_the_request_needs(database: str) -> None:
    async with reads(database, indexed=990) as api, asyncio.TaskGroup() as group:
        api.machine.token(contract(1), 5)
        await api.hold([contract(1)])
        path = f"/tokens/ethereum/balances/{checksum(HOLDER)}"
        late = await api.get(f"{path}?min_block=991&min_block_wait=0.05")
        assert late.fault(503)["details"] == {"block": 990}
        assert (late.headers["x-block-number"], late.headers["retry-after"]) == ("990", "1")
        waiting = group.create_task(api.get(f"{path}?min_block=991&min_block_wait=10"))
        await asyncio.sleep(0.2)
        await api.index(995)
        reply = await waiting
        assert (reply.status, reply.headers["x-block-number"]) == (200, "995")
        assert reply.json["as_of_block"] == 995
        assert (await api.get(path)).headers["x-block-number"] == "995"


@on_uvloop
async def test_cached_metadata_from_before_the_block_that_the_request_needs_is_read_again(database: str) -> None:
    async with reads(database) as api:
        api.machine.token(contract(1), 5)
        path = f"/tokens/ethereum/metadata/{checksum(contract(1))}"
        assert (await api.get(path)).json["as_of_block"] == 1000
        api.harness.chain.head = 1001
        await api.harness.look()
        assert (await api.get(path)).json["as_of_block"] == 1000
        assert (await api.get(f"{path}?min_block=1001")).json["as_of_block"] == 1001


@on_uvloop
async def test_upstreams_that_a_read_asked_are_in_its_record(database: str) -> None:
    async with reads(database) as api:
        api.machine.token(contract(1), 5)
        reply = await api.get(f"/tokens/ethereum/metadata/{checksum(contract(1))}?explain=1")
        await api.harness.worker.app.requests.flush()
        record = (await api.get(f"/requests/{reply.headers['x-request-id']}")).json
        assert (record["surface"], record["block"]) == ("rest", 1000)
        assert {(each["kind"], each["outcome"]) for each in record["attempts"]} == {
            ("read", "for the reply: eth_call, answered")
        }
        assert all(0 <= each["after_ms"] <= record["ms"] for each in record["attempts"])


@on_uvloop
async def test_pruned_block_is_an_error_and_not_an_empty_list(database: str) -> None:
    def pruned(_: list[Any]) -> Any:
        raise Refused(-32000, "missing trie node 1234 (path )")

    async with reads(database, indexed=10) as api:
        await api.hold([contract(1)])
        api.harness.upstreams[0].answers["eth_call"] = pruned
        (await api.get(f"/tokens/ethereum/balances/{checksum(HOLDER)}")).fault(503)


@on_uvloop
async def test_network_without_an_index_is_an_error_and_not_an_empty_list(database: str) -> None:
    async with reads(database, indexed=None) as api:
        for path in (f"/tokens/ethereum/balances/{checksum(HOLDER)}", f"/nfts/ethereum/owned/{checksum(HOLDER)}"):
            assert "not indexed" in (await api.get(path)).fault(503)["message"]
    async with reads(database, indexed=None, follower={"networks": ["dev/mainnet"]}) as api:
        assert "not configured to be followed" in (await api.get(path)).fault(404)["message"]


@on_uvloop
async def test_hundred_concurrent_requests_share_one_read(database: str) -> None:
    async with reads(database) as api:
        for n in range(3):
            api.machine.token(contract(n), n + 1)
        await api.hold(map(contract, range(3)))
        for path, calls in (
            (f"/tokens/ethereum/balances/{checksum(HOLDER)}", 2),
            (f"/tokens/ethereum/metadata/{checksum(contract(1))}", 1),
        ):
            before = api.requests
            replies = await asyncio.gather(*(api.get(path) for _ in range(100)))
            assert {reply.status for reply in replies} == {200}
            assert len({reply.body for reply in replies}) == 1
            assert api.requests - before == calls


@on_uvloop
async def test_hostile_tokens_do_not_affect_others(database: str) -> None:
    """One contract burns all gas, one reverts, one returns impossible decimals, one has a name of a megabyte."""

    async with reads(database) as api:
        for n in range(8):
            api.machine.token(contract(n), 10**18, f"Coin {n}", f"C{n}")
        balance = abi.word_of(7)
        api.machine.contracts[contract(0)] = burning
        api.machine.contracts[contract(1)] = answering({})
        api.machine.contracts[contract(2)] = answering(
            {abi.selector("balanceOf(address)"): balance, abi.selector("decimals()"): abi.word_of(256)}
        )
        long = bytes(eth_abi.encode(["string"], ["<script>" * 100_000]))
        api.machine.contracts[contract(3)] = answering(
            {
                abi.selector("balanceOf(address)"): balance,
                abi.selector("name()"): long,
                abi.selector("symbol()"): Reverted(b"no"),
            }
        )
        await api.hold(map(contract, range(8)))
        listed = (await api.balances())["tokens"]
        assert [t["symbol"] for t in listed] == ["C4", "C5", "C6", "C7", None, None]
        odd, long_one = listed[4:]
        assert (odd["decimals"], odd["formatted_balance"], odd["balance"]) == (None, None, "7")
        assert len(long_one["name"]) == 256


@on_uvloop
async def test_cached_tokens_of_two_networks_are_separate(database: str) -> None:
    async with reads(database) as one:
        one.machine.token(contract(1), 5, "One", "ONE")
        cache = one.harness.worker.app.data.cache
        await cache.put("ethereum/sepolia", "token", {contract(1).hex(): {"contract": "0x", "name": "Other"}}, ttl_s=60)
        await cache.put("ethereum/sepolia", "metadata", {contract(1).hex(): {"name": "Other"}}, ttl_s=60)
        await one.hold([contract(1)])
        assert (await one.balances())["tokens"][0]["name"] == "One"
        found = (await one.get(f"/tokens/ethereum/metadata/{checksum(contract(1))}")).json
        assert found["name"] == "One"


@on_uvloop
async def test_truncated_list_leaves_out_zero_balances_first(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evm_tokens, "MOST_CONTRACTS", 4)

    async with reads(database) as api:
        for n in range(8):
            api.machine.token(contract(n), 5, symbol=f"C{n}")
        await api.hold(map(contract, range(4)), amount=0)
        listed = await api.balances()
        assert ([t["symbol"] for t in listed["tokens"]], "truncated" in listed) == (["C0", "C1", "C2", "C3"], False)
        await api.hold(map(contract, range(4, 7)))
        await api.move(1001)
        listed = await api.balances()
        assert [t["symbol"] for t in listed["tokens"]] == ["C0", "C4", "C5", "C6"]
        assert (listed["total"], listed["truncated"]) == (4, True)


@on_uvloop
async def test_cached_list_of_a_replaced_block_is_not_served(database: str) -> None:
    async with reads(database) as api:
        api.machine.token(contract(1), 5)
        await api.hold([contract(1)])
        api.machine.token(contract(2), 7)
        assert (await api.balances())["total"] == 1
        await api.hold([contract(2)])
        await api.database.execute("update followed_networks set block_hash = $1", b"\x07" * 32)

        async def is_new() -> bool:
            return bool((await api.balances())["total"] == 2)

        await until(is_new)


@on_uvloop
async def test_token_without_decimals_is_read_again_soon(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_contracts, "KEPT_UNKNOWN_S", 0.0)

    async with reads(database) as api:
        symbol = bytes(eth_abi.encode(["string"], ["C"]))
        answers: dict[bytes, Any] = {
            abi.selector("balanceOf(address)"): abi.word_of(5),
            abi.selector("symbol()"): symbol,
        }
        api.machine.contracts[contract(1)] = answering(answers)
        await api.hold([contract(1)])
        assert (await api.balances())["tokens"][0]["decimals"] is None
        answers[abi.selector("decimals()")] = abi.word_of(6)
        await api.move(1001)
        assert (await api.balances())["tokens"][0]["decimals"] == 6


@on_uvloop
async def test_ens_name_is_accepted_for_a_contract(database: str) -> None:
    resolver = contract(900)

    async with reads(database) as api:
        registry = api.harness.route.network.facts.ens
        assert registry is not None
        node, token = ens.namehash("token.example.eth"), abi.word_of(int.from_bytes(contract(1), "big"))
        resolved = abi.word_of(int.from_bytes(resolver, "big"))
        api.machine.contracts[bytes.fromhex(registry[2:])] = when(ens.ask_registry(node), resolved)
        api.machine.contracts[resolver] = when(ens.ask_resolver(node), token)
        api.machine.token(contract(1), 5, "One", "ONE")
        shown = conforms((await api.get("/tokens/ethereum/metadata/token.example.eth")).json, "TokenMetadata")
        assert (shown["name"], shown["contract"]) == ("One", checksum(contract(1)))
        collection_of(api.machine, "", supply=abi.word_of(1))
        shown = conforms((await api.get("/nfts/ethereum/collection/token.example.eth")).json, "NftCollection")
        assert (shown["name"], shown["contract"]) == ("Valves", checksum(contract(1)))
        for path in ("/tokens/ethereum/metadata/unknown.eth", "/nfts/ethereum/metadata/unknown.eth/1"):
            assert "'contract'" in (await api.get(path)).fault(404)["message"]


def when(calldata: bytes, result: bytes) -> Contract:
    """A contract that returns a result for one call, and reverts for any other."""

    def act(data: bytes) -> tuple[bytes, int]:
        if data != calldata:
            raise Reverted(b"unknown")
        return result, CALL_GAS

    return act


@on_uvloop
async def test_logo_comes_from_the_token_lists(database: str) -> None:
    (chain_id, listed), logo = next(iter(TABLES.logos.items()))
    assert chain_id == 1
    token, other = bytes.fromhex(listed[2:]), contract(1)
    async with reads(database) as api:
        api.machine.token(token, 5)
        api.machine.token(other, 5)
        await api.hold([token, other])
        logos = {item["contract"]: item["logo_url"] for item in (await api.balances())["tokens"]}
        assert logos == {checksum(token): logo, checksum(other): None}
        metadata = conforms((await api.get(f"/tokens/ethereum/metadata/{listed}")).json, "TokenMetadata")
        assert metadata["logo_url"] == logo


@on_uvloop
async def test_unavailable_database_is_a_503(database: str) -> None:
    async with rpc_harness(1, network=LIVE) as harness, await harness.worker.connect() as client:
        path = f"/v1/tokens/ethereum/balances/{checksum(HOLDER)}"
        (await client.send(request("GET", path, key=harness.worker.keys["main"]))).fault(503)


# Collections: features that the contracts of the development chain do not have


def collection_of(machine: Machine, uri: str, *, supply: bytes | Exception) -> None:
    yes, no = abi.word_of(1), abi.word_of(0)
    texts = {"name()": "Valves", "symbol()": "VALV", "contractURI()": uri}
    answers: dict[bytes, Any] = {abi.selector(s): bytes(eth_abi.encode(["string"], [t])) for s, t in texts.items()}
    answers[abi.selector("totalSupply()")] = supply
    of_interface = {"01ffc9a7": yes, "ffffffff": no, "80ac58cd": yes}
    plain = answering(answers)

    def act(data: bytes) -> tuple[bytes, int]:
        if data[:4] == abi.selector("supportsInterface(bytes4)"):
            return of_interface.get(data[4:8].hex(), no), CALL_GAS
        return plain(data)

    machine.contracts[contract(1)] = act


@asynccontextmanager
async def marketplace(reply: Callable[[str], web.Response]) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return reply(request.path)

    application = web.Application()
    application.router.add_get("/{tail:.*}", handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


DOCUMENT = (
    'data:application/json;utf8,{"name":"Not this","description":"Ten thousand\\u202e valves.",'
    '"image":"ipfs://bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi/logo.png",'
    '"banner_image":"https://example.com/banner.png","external_link":"javascript:alert(1)"}'
)


@pytest.mark.parametrize(
    ("body", "eth", "usd"),
    [
        ('{"floor_price_eth":"0.850000000000000001"}', "0.850000000000000001", "1700.00"),
        ('{"floor_price_eth":0.85}', "0.85", "1700.00"),
        ('{"floor_price_eth":"-1"}', None, None),
        ('{"floor_price_eth":"NaN"}', None, None),
        ('{"floor_price_eth":null}', None, None),
        ('{"floor_price_eth":"1e500"}', None, None),
        ('{"floor_price_eth":"1e-999999"}', None, None),
        ("<html>", None, None),
    ],
)
@on_uvloop
async def test_collection_has_the_texts_of_its_document_and_the_marketplaces_floor_price(
    database: str, body: str, eth: str | None, usd: str | None
) -> None:
    def reply_to(path: str) -> web.Response:
        assert path == f"/1/{checksum(contract(1))}"
        return web.Response(text=body, content_type="application/json")

    fixed = {"sources": ["fixed"], "fixed": [{"network": LIVE, "contract": "", "usd": "2000"}]}
    async with (
        marketplace(reply_to) as url,
        reads(database, prices=fixed, nfts={"floor_url": f"{url}/{{chain_id}}/{{contract}}"}) as api,
    ):
        collection_of(api.machine, DOCUMENT, supply=abi.word_of(2**53 - 1))
        reply = await api.get(f"/nfts/ethereum/collection/{checksum(contract(1))}")
        assert conforms(reply.json, "NftCollection") == {
            "contract": checksum(contract(1)),
            "chain": "ethereum",
            "name": "Valves",
            "symbol": "VALV",
            "standard": "ERC721",
            "total_supply": 2**53 - 1,
            "num_owners": 0,
            "floor_price_eth": eth,
            "floor_price_usd": usd,
            "banner_url": "https://example.com/banner.png",
            "image_url": "ipfs://bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi/logo.png",
            "description": "Ten thousand valves.",
            "as_of_block": 1000,
        }


@on_uvloop
async def test_supply_too_large_for_a_json_number_is_null(database: str) -> None:
    async with reads(database) as api:
        collection_of(api.machine, "", supply=abi.word_of(2**256 - 1))
        reply = await api.get(f"/nfts/ethereum/collection/{checksum(contract(1))}")
        assert conforms(reply.json, "NftCollection")["total_supply"] is None
