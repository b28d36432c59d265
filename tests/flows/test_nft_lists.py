"""NFT documents in lists and collections: those that can be read quickly are included, and lists do not wait for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import eth_abi
import pytest
from aiohttp import web

from proxy.chains.evm import abi
from proxy.chains.registry import Network
from proxy.core import metadata
from proxy.core.metadata import Metadata
from proxy.services.tokens import nft_metadata
from proxy.services.tokens.nft_metadata import NftMetadata
from tests.contract_upstreams import CALL_GAS, Contract, Machine, Reverted
from tests.rpc_harness import rpc_harness
from tests.wire.external_servers import Pages, pages

CONTRACT, ITEMS = b"\x11" * 20, b"\x22" * 20
CID = "bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi"


@dataclass
class Gallery:
    nfts: NftMetadata
    network: Network
    machine: Machine
    site: Pages

    async def known(self, *token_ids: int, contract: bytes = CONTRACT) -> list[tuple[str | None, str | None] | None]:
        found = await self.nfts.known(self.network, [(contract, token_id) for token_id in token_ids])
        return [None if each is None else (each["name"], each["image_url"]) for each in found]


def with_uris(signature: str, uris: Mapping[int, str]) -> Contract:
    """A contract that returns the URIs of some tokens, and reverts for any other."""

    def act(data: bytes) -> tuple[bytes, int]:
        uri = uris.get(int.from_bytes(data[4:36], "big"))
        if data[:4] != abi.selector(signature) or uri is None:
            raise Reverted(b"no such token")
        return bytes(eth_abi.encode(["string"], [uri])), CALL_GAS

    return act


@asynccontextmanager
async def gallery(**nfts: Any) -> AsyncIterator[Gallery]:
    async with pages() as site:
        egress = {"allow": ["127.0.0.0/8"], "http": True, "ports": []}
        settings = {"ipfs_gateway": site.url("/gate/"), "retry_s": 60.0, **nfts}
        async with rpc_harness(1, egress=egress, nfts=settings) as harness:
            machine = Machine()
            harness.upstreams[0].answers["eth_call"] = machine.call
            yield Gallery(harness.worker.app.data.nft_metadata, harness.route.network, machine, site)


async def test_names_and_images_of_many_tokens_are_read_by_one_call() -> None:
    async with gallery() as nft_api:
        uris = {
            n: nft_api.site.put(f"/{n}", b'{"name": "Number %d", "image": "ipfs://%s/%d"}' % (n, CID.encode(), n))
            for n in range(30)
        }
        uris[30] = 'data:application/json,{"name": "Here"}'
        uris[31] = "data:image/svg+xml,<svg/>"
        nft_api.machine.contracts[CONTRACT] = with_uris("tokenURI(uint256)", uris)
        known = await nft_api.known(*range(33))
        assert known[:30] == [(f"Number {n}", f"ipfs://{CID}/{n}") for n in range(30)]
        assert known[30:] == [("Here", None), (None, "data:image/svg+xml,%3Csvg/%3E"), (None, None)]
        assert len([size for size in nft_api.machine.sizes if size > 1]) == 1
        fetched = len(nft_api.site.requested)
        assert await nft_api.known(*range(30)) == known[:30]
        assert len(nft_api.site.requested) == fetched == 30


async def test_tokens_of_both_standards_are_read() -> None:
    async with gallery() as nft_api:
        nft_api.site.put(f"/gate/ipfs/{CID}/{7:064x}.json", b'{"name": "Seven"}')
        nft_api.machine.contracts[ITEMS] = with_uris("uri(uint256)", {7: f"ipfs://{CID}/{{id}}.json"})
        assert await nft_api.known(7, contract=ITEMS) == [("Seven", None)]


async def test_list_waits_for_a_slow_document_only_once_and_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        await hanging.wait()
        return web.json_response({"name": "Late"})

    async with gallery(fetch_timeout_s=30.0) as nft_api:
        nft_api.site.pages["/slow"] = page
        uris = {1: nft_api.site.url("/slow"), 2: nft_api.site.put("/quick", b'{"name": "Quick"}')}
        nft_api.machine.contracts[CONTRACT] = with_uris("tokenURI(uint256)", uris)
        assert await nft_api.known(2) == [("Quick", None)]
        monkeypatch.setattr(nft_metadata, "LISTING_S", 0.5)
        assert await nft_api.known(1, 2) == [None, ("Quick", None)]
        assert await nft_api.known(1, 2) == [(None, None), ("Quick", None)]
        assert nft_api.site.requested.count("/slow") == 1
        hanging.set()


async def test_large_image_is_left_out_of_lists() -> None:
    async with gallery() as nft_api:
        large = "data:image/png;base64," + "A" * 20_000
        nft_api.machine.contracts[CONTRACT] = with_uris(
            "tokenURI(uint256)", {1: nft_api.site.put("/1", b'{"name": "A", "image": "%s"}' % large.encode())}
        )
        assert await nft_api.known(1) == [("A", None)]


async def test_document_with_a_huge_number_does_not_fail_the_list() -> None:
    async with gallery() as nft_api:
        huge = 'data:application/json,{"name": "Huge", "v": 1e9999999999999999999999}'
        uris = {1: huge, 2: 'data:application/json,{"name": "Two"}'}
        nft_api.machine.contracts[CONTRACT] = with_uris("tokenURI(uint256)", uris)
        assert await nft_api.known(1, 2) == [("Huge", None), ("Two", None)]


async def test_document_that_crashes_the_parser_counts_as_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = metadata.read

    def read(body: bytes) -> Metadata | None:
        if b"Broken" in body:
            raise ZeroDivisionError
        return whole(body)

    monkeypatch.setattr(metadata, "read", read)
    async with gallery() as nft_api:
        uris = {1: 'data:application/json,{"name": "Broken"}', 2: 'data:application/json,{"name": "Two"}'}
        nft_api.machine.contracts[CONTRACT] = with_uris("tokenURI(uint256)", uris)
        assert await nft_api.known(1, 2) == [(None, None), ("Two", None)]


async def test_list_leaves_out_long_inline_documents_and_yields_between_the_others() -> None:
    def uri(length: int) -> str:
        return 'data:application/json,{"name": "A", "x": "%s"}' % ("x" * length)

    async with gallery() as nft_api:
        uris = {n: uri(10_000) for n in range(20)} | {20: uri(70_000)}
        nft_api.machine.contracts[CONTRACT] = with_uris("tokenURI(uint256)", uris)
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                # Count only turns while documents are being read.
                turns += len(seen) not in (0, 20)

        seen: list[int] = []
        whole = nft_api.nfts._read

        async def read(uri: str) -> nft_metadata.DescribedNft:
            seen.append(len(uri))
            return await whole(uri)

        nft_api.nfts._read = read  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            other = group.create_task(take_turns())
            known = await nft_api.known(*range(21))
            other.cancel()
        assert known == [("A", None)] * 20 + [None]
        assert len(seen) == 20, "a URI that is too long must not be decoded"
        assert turns >= 19


async def test_uri_too_long_for_any_allowed_document_is_not_decoded() -> None:
    async with gallery(max_metadata_bytes=1024) as nft_api:
        for uri, status in (
            ("data:application/json,%7B%7D" + "%20" * 1_022, "ok"),
            ("data:application/json," + " " * 1_100 + "{}", "too_large"),
            ("data:application/json;base64,!" + "A" * 6_000, "too_large"),
        ):
            assert (await nft_api.nfts._read(uri)).status == status


async def test_large_document_does_not_block_the_event_loop() -> None:
    """It is decoded in a thread."""
    async with gallery() as nft_api:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with asyncio.TaskGroup() as group:
            other = group.create_task(take_turns())
            await asyncio.sleep(0)
            described = await nft_api.nfts._read("data:application/json,%7B%22name%22:%22A%22%7D" + "%20" * 300_000)
            other.cancel()
        assert (described.status, described.metadata.name) == ("ok", "A")
        assert turns >= 10


async def test_empty_list_takes_no_call() -> None:
    async with gallery() as nft_api:
        assert await nft_api.known() == []
        assert nft_api.machine.sizes == []


# Documents of collections


async def test_document_is_reduced_to_its_texts_and_cached() -> None:
    async with gallery() as nft_api:
        url = nft_api.site.put(
            "/c", b'{"description": "All of \\ud800 it", "image": "ipfs://x", "fee": 100, "links": []}'
        )
        document = await nft_api.nfts.document(url)
        assert document == {"description": "All of ? it", "image": "ipfs://x"}
        assert await nft_api.nfts.document(url) == document
        assert nft_api.site.requested == ["/c"]


async def test_unreadable_document_is_none() -> None:
    async with gallery() as nft_api:
        for uri in (
            "",
            "nowhere",
            nft_api.site.url("/missing"),
            "data:,x",
            "data:application/json,[]",
            "http://10.0.0.1/",
        ):
            assert await nft_api.nfts.document(uri) is None
