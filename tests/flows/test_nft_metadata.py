"""NFT metadata over HTTP on the development chain, compared with reads of the contracts by web3.py."""

from __future__ import annotations

import asyncio
import gzip
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from aiohttp import web
from web3 import AsyncHTTPProvider, AsyncWeb3

from tests import service as service_room
from tests.service import Service, until
from tests.shapes import conforms
from tests.wire.external_servers import Listener, Pages, listener, pages

CID = "bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi"
TX = "bNbA3TEQVL60xlgCcqdz4ZPHFZ711cZ3hmkpGttDt_U"
_TO, _ID, _URI = ({"type": kind, "name": ""} for kind in ("address", "uint256", "string"))
_WRITE = {"type": "function", "stateMutability": "nonpayable", "outputs": []}
MINT = [{**_WRITE, "name": "mint", "inputs": [_TO, _ID, _URI]}, {**_WRITE, "name": "repaint", "inputs": [_ID, _URI]}]
OWNER_OF = {"type": "function", "stateMutability": "view", "name": "ownerOf", "inputs": [_ID], "outputs": [_TO]}
LIMIT = 8192


@dataclass
class NftHarness:
    """A running service whose gateways are a local site. 127.0.0.1 is the only local address it may connect to."""

    service: Service
    site: Pages
    local: Listener
    pictures: Any
    minter: str
    _next_id: int = 1000

    async def mint(self, uri: str) -> int:
        self._next_id += 1
        sent = await self.pictures.functions.mint(self.minter, self._next_id, uri).transact({"from": self.minter})
        receipt = await self.pictures.w3.eth.wait_for_transaction_receipt(sent, timeout=60)
        await until(lambda: self._has_seen(receipt["blockNumber"]))
        return self._next_id

    async def _has_seen(self, block: int) -> bool:
        """Whether the service has seen the block."""
        response = await self.service.rpc("eth_blockNumber")
        return int((await response.json())["result"], 16) >= block

    async def get(self, contract: str, token_id: Any, query: str = "") -> tuple[int, dict[str, Any]]:
        path = f"/v1/nfts/dev/metadata/{contract}/{token_id}{query}"
        response = await self.service.get(path, **{"X-API-Key": self.service.keys["enterprise"]})
        return response.status, await response.json()

    async def nft(self, contract: str, token_id: Any, query: str = "") -> dict[str, Any]:
        status, body = await self.get(contract, token_id, query)
        assert status == 200, body
        found: dict[str, Any] = conforms(body, "Nft")
        return found

    async def minted(self, uri: str) -> dict[str, Any]:
        """Mint a token with this URI; return it as the service shows it."""
        return await self.nft(self.pictures.address, await self.mint(uri))

    def collection(self, kind: str, index: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = [each for each in self.service.ready["nfts"] if each["kind"] == kind][index]
        return found


@pytest.fixture(scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NftHarness]:
    async with pages() as site, listener("127.0.0.2") as local:
        env = {
            "PENSTOCK_EGRESS__ALLOW": '["127.0.0.1/32"]',
            "PENSTOCK_EGRESS__HTTP": "true",
            "PENSTOCK_EGRESS__PORTS": "[]",
            "PENSTOCK_NFTS__IPFS_GATEWAY": site.url("/gate"),
            "PENSTOCK_NFTS__ARWEAVE_GATEWAY": site.url("/weave"),
            "PENSTOCK_NFTS__FETCH_TIMEOUT_S": "3",
            "PENSTOCK_NFTS__MAX_METADATA_BYTES": str(LIMIT),
            "PENSTOCK_NFTS__RETRY_S": "0",
        }
        options = ("--workers", "1", "--no-bundler")
        service = await service_room.start(tmp_path_factory.mktemp("nfts"), *options, env=env)
        w3 = AsyncWeb3(AsyncHTTPProvider(service.ready["upstream_url"]))
        pictures = next(each["address"] for each in service.ready["nfts"] if each["kind"] == "erc721")
        try:
            contract = w3.eth.contract(pictures, abi=[*MINT, OWNER_OF])
            yield NftHarness(service, site, local, contract, (await w3.eth.accounts)[0])
        finally:
            await w3.provider.disconnect()
            await service_room.stop(service)


def data_uri(members: Mapping[str, Any]) -> str:
    return f"data:application/json;base64,{b64encode(orjson.dumps(members)).decode()}"


# Contracts of the development chain


async def test_every_token_is_returned_with_its_owner(harness: NftHarness) -> None:
    """The owner is read from the chain whatever the URI is. A URI that cannot be fetched is not an error."""
    statuses = {}
    for token in harness.collection("erc721")["tokens"]:
        found = await harness.nft(harness.pictures.address, token["token_id"])
        assert found["owner"] == await harness.pictures.functions.ownerOf(int(token["token_id"])).call()
        assert (found["contract"], found["token_id"]) == (harness.pictures.address, token["token_id"])
        assert found["standard"] == "ERC721"
        statuses[token["uri"][:8]] = found["fetch_status"]
    assert statuses == {
        "data:app": "ok",
        "ipfs://b": "not_found",
        "this is ": "invalid",
        "": "none",
        "http://1": "unreachable",
        "ar://bNb": "not_found",
    }


async def test_metadata_on_the_chain_is_read(harness: NftHarness) -> None:
    found = await harness.nft(harness.pictures.address, 1)
    assert (found["name"], found["description"]) == ("A Pipe", "A line from left to right.")
    assert found["image_url"].startswith("data:image/svg+xml;base64,")
    assert found["image_gateway_url"] is None
    assert found["traits"] == [{"trait_type": "Colour", "value": "blue"}, {"trait_type": "Width", "value": "8"}]


async def test_collection_from_before_erc165_has_owners_and_no_metadata(harness: NftHarness) -> None:
    old = harness.collection("erc721-old")
    found = await harness.nft(old["address"], 2)
    assert (found["standard"], found["fetch_status"], found["token_uri"]) == ("ERC721", "none", None)
    assert found["owner"] is not None


async def test_token_id_is_filled_into_the_uri(harness: NftHarness) -> None:
    items = harness.collection("erc1155", 1)

    async def read() -> dict[str, Any]:
        return await harness.nft(items["address"], hex(314592))

    found = await read()
    assert (found["standard"], found["token_id"]) == ("ERC1155", "314592")
    assert found["name"] == f"Item {314592:064x}"
    assert found["traits"] == [{"trait_type": "weight", "value": "2"}]
    # The only holder comes from the index, once that has reached the block.
    alice = harness.service.ready["ens"]["names"]["alice.eth"]

    async def has_owner() -> bool:
        return bool((await read())["owner"] == alice)

    await until(has_owner, within_s=30.0)


async def test_token_of_many_holders_has_no_owner(harness: NftHarness) -> None:
    harness.site.put(f"/gate/ipfs/{CID}/{1:064x}.json", b'{"name": "One"}')
    items = harness.collection("erc1155")

    async def is_indexed() -> bool:
        return (await harness.get(items["address"], 99))[0] == 404

    await until(is_indexed, within_s=30.0)  # only with an index it is known that there is no such token
    found = await harness.nft(items["address"], 1, "?refresh=true")
    assert (found["name"], found["owner"], found["fetch_status"]) == ("One", None, "ok")


@pytest.mark.parametrize("token_id", ["8", "999999", str(2**256 - 1), hex(2**256 - 1)])
async def test_token_that_does_not_exist_is_404(harness: NftHarness, token_id: str) -> None:
    """Token 8 was burned."""
    status, body = await harness.get(harness.pictures.address, token_id)
    assert (status, body["error"]["code"]) == (404, "not_found")


async def test_address_without_an_nft_contract_is_404(harness: NftHarness) -> None:
    for contract in (harness.service.ready["tokens"][0]["address"], "0x" + "11" * 20, harness.minter):
        assert (await harness.get(contract, 1))[0] == 404


@pytest.mark.parametrize(
    ("path", "parameter"),
    [("x/1", "contract"), ("0x12/1", "contract"), ("{c}/x", "token_id"), ("{c}/-1", "token_id"),
     ("{c}/" + str(2**256), "token_id"), ("{c}/1?refresh=maybe", "refresh"), ("{c}/1?fresh=true", "fresh")],
)  # fmt: skip
async def test_error_names_the_invalid_parameter(harness: NftHarness, path: str, parameter: str) -> None:
    whole = f"/v1/nfts/dev/metadata/{path.format(c=harness.pictures.address)}"
    response = await harness.service.get(whole, **{"X-API-Key": harness.service.keys["enterprise"]})
    body = await response.json()
    assert response.status == 400
    assert f"'{parameter}'" in body["error"]["message"]


# Gateways and the cache


async def test_ipfs_is_read_through_the_configured_gateway(harness: NftHarness) -> None:
    harness.site.put(
        f"/gate/ipfs/{CID}/own.json", orjson.dumps({"name": "Own", "image": f"ipfs://ipfs/{CID}/own 1.png"})
    )
    found = await harness.minted(f"ipfs://{CID}/own.json")
    assert found["name"] == "Own"
    assert found["image_url"] == f"ipfs://{CID}/own%201.png"
    assert found["image_gateway_url"] == harness.site.url(f"/gate/ipfs/{CID}/own%201.png")


async def test_foreign_gateway_is_replaced_by_the_configured_one(harness: NftHarness) -> None:
    harness.site.put(f"/gate/ipfs/{CID}/theirs.json", b'{"name": "Theirs"}')
    found = await harness.minted(f"https://gateway.example.com/ipfs/{CID}/theirs.json")
    assert (found["name"], found["fetch_status"]) == ("Theirs", "ok")


async def test_arweave_is_read_through_the_configured_gateway(harness: NftHarness) -> None:
    harness.site.put(f"/weave/{TX}/w.json", orjson.dumps({"name": "Woven", "image": f"ar://{TX}/w.png"}))
    found = await harness.minted(f"ar://{TX}/w.json")
    assert (found["name"], found["image_gateway_url"]) == ("Woven", harness.site.url(f"/weave/{TX}/w.png"))


async def test_uri_of_an_image_is_shown_as_the_image(harness: NftHarness) -> None:
    url = harness.site.put("/big.png", b"\x89PNG" + b"x" * (2 * LIMIT), media_type="image/png")
    found = await harness.minted(url)
    assert (found["image_url"], found["image_gateway_url"], found["fetch_status"]) == (url, url, "ok")
    inline = await harness.minted("data:image/svg+xml;utf8,<svg fill='#06c'/>")
    assert inline["image_url"] == "data:image/svg+xml;utf8,%3Csvg%20fill='%2306c'/%3E"


async def test_document_is_cached_until_a_refresh_or_a_new_uri(harness: NftHarness) -> None:
    url = harness.site.put("/kept.json", b'{"name": "First"}')
    token_id = await harness.mint(url)

    async def name(query: str = "") -> str:
        return str((await harness.nft(harness.pictures.address, token_id, query))["name"])

    assert await name() == "First"
    harness.site.put("/kept.json", b'{"name": "Second"}')
    assert await name() == await name("?refresh=false") == "First"
    assert harness.site.requested.count("/kept.json") == 1
    assert await name("?refresh=true") == "Second"
    assert await name() == "Second"
    moved = harness.site.put("/moved.json", b'{"name": "Third"}')
    sent = await harness.pictures.functions.repaint(token_id, moved).transact({"from": harness.minter})
    await harness.pictures.w3.eth.wait_for_transaction_receipt(sent, timeout=60)

    async def is_third() -> bool:
        return await name() == "Third"

    await until(is_third)


async def test_failed_document_is_fetched_again(harness: NftHarness) -> None:
    token_id = await harness.mint(harness.site.url("/later.json"))
    assert (await harness.nft(harness.pictures.address, token_id))["fetch_status"] == "not_found"
    harness.site.put("/later.json", b'{"name": "Here"}')
    found = await harness.nft(harness.pictures.address, token_id)
    assert (found["name"], found["fetch_status"]) == ("Here", "ok")


async def test_concurrent_requests_share_one_fetch(harness: NftHarness) -> None:
    gate = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({"name": "Slow"})

    harness.site.pages["/slow.json"] = page
    token_id = await harness.mint(harness.site.url("/slow.json"))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(harness.nft(harness.pictures.address, token_id)) for _ in range(8)]
        await until(lambda: "/slow.json" in harness.site.requested)
        gate.set()
    assert {task.result()["name"] for task in tasks} == {"Slow"}
    assert harness.site.requested.count("/slow.json") == 1


# Untrusted documents


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.2:{port}/", "https://127.0.0.2:{port}/", "http://2130706434:{port}/", "http://0x7f000002:{port}/"),
        *("http://0177.0.0.2:{port}/", "http://127.2:{port}/", "http://[::ffff:127.0.0.2]:{port}/", "http://127.0.0.2.:{port}/"),
        *("http://１２７.０.０.２:{port}/", "http://user:secret@127.0.0.2:{port}/", "http://169.254.169.254/latest/meta-data/"),
        *("http://127.0.0.1@127.0.0.2:{port}/", "http://127.0.0.1:{port}\\@127.0.0.2:{port}/", "http://[64:ff9b::7f00:2]:{port}/"),
    ],
)  # fmt: skip
async def test_uri_never_reaches_a_local_listener(harness: NftHarness, url: str) -> None:
    found = await harness.minted(url.format(port=harness.local.port))
    assert (found["fetch_status"], found["name"], found["traits"]) == ("refused", None, [])
    assert harness.local.connections == 0


async def test_redirect_never_reaches_a_local_listener(harness: NftHarness) -> None:
    to = f"http://127.0.0.2:{harness.local.port}/"
    for uri in (
        harness.site.move("/away", to),
        harness.site.move("/twice", harness.site.url("/away")),
        harness.site.move(f"/gate/ipfs/{CID}/away", to) and f"ipfs://{CID}/away",
    ):
        assert (await harness.minted(uri))["fetch_status"] == "refused"
    assert harness.local.connections == 0


async def _drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)
    return response


async def test_harmful_documents_are_abandoned_with_the_reason(harness: NftHarness) -> None:
    site = harness.site
    site.pages["/drip"] = _drip
    uris = {
        "timeout": site.url("/drip"),
        "too_large": site.put("/large", b'{"name": "' + b"x" * 10_000_000 + b'"}'),
        "invalid": site.put("/deep", b'{"a":' * 1_500),
        "not_found": site.url("/nowhere"),
    }
    bomb = site.put("/bomb", gzip.compress(b" " * 50_000_000), Content_Encoding="gzip")
    more = {
        bomb: "too_large",
        data_uri({"name": "x" * LIMIT}): "too_large",
        site.put("/html", "<html><body>Not here</body></html>", media_type="text/html"): "invalid",
        "data:application/json;base64,!!!": "invalid",
        "javascript:alert(1)": "invalid",
        "file:///etc/passwd": "invalid",
    }
    for status, uri in [*uris.items(), *((status, uri) for uri, status in more.items())]:
        found = await harness.minted(uri)
        assert (found["fetch_status"], found["name"], found["image_url"], found["traits"]) == (
            status,
            None,
            None,
            [],
        ), uri[:80]
        assert found["owner"] == harness.minter


async def test_strange_texts_are_cleaned(harness: NftHarness) -> None:
    document = (
        b'{"name": "<script>alert(1)</script>\\u0000\\u202e\\ud800", "image": "javascript:alert(1)", "description": NaN,'
        b'"attributes": [{"trait_type": "\\u001b[31mRed", "value": 1e999}, {"trait_type": "Long", "value": "'
        + b"y" * 5_000
        + b'"}]}'
    )
    found = await harness.minted(harness.site.put("/strange", document))
    assert found["name"] == "<script>alert(1)</script>"
    assert (found["image_url"], found["description"]) == (None, None)
    assert found["traits"] == [
        {"trait_type": "[31mRed", "value": "1E+999"},
        {"trait_type": "Long", "value": "y" * 1000},
    ]
