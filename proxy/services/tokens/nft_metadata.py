"""One NFT: what its contract says of it, and what the document says that its URI leads to.

The contract is asked every time, because owners change. The document is a stranger's: it is fetched with care, kept, and read
anew when the URI has changed or somebody asks for it. A document that cannot be had is no failure: what only it knows is null,
and the answer says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from proxy.chains.evm import abi, address, nfts
from proxy.chains.evm.nfts import NftContractFacts
from proxy.chains.registry import Network
from proxy.core import display_text, metadata, uris
from proxy.core.metadata import NOTHING, Metadata
from proxy.core.uris import Gateways, InlineDocument
from proxy.errors import NotFound
from proxy.settings import NftSettings
from proxy.store.cache import DataCache
from proxy.store.holdings import HoldingStore
from proxy.wire.fetcher import Fetched, Fetcher, FetchOutcome

log = logging.getLogger("penstock.nfts")

T = TypeVar("T")

MetadataStatus = FetchOutcome | Literal["none"]

_KIND, _DOCUMENT = "nft", "document"
_STANDARDS = {721: "ERC721", 1155: "ERC1155"}
# A URI that is longer is the document itself: it is not repeated.
_LONGEST_SHOWN = 2048
# A byte of a document takes as many characters of its URI, at most: what is too long by that is not decoded at all.
_LONGEST_ENCODING = 3
# In a list of a hundred tokens an image may not have more; and a document that is its own URI, which all wait for, no more than
# this.
_LONGEST_LISTED = 16_384
_LONGEST_LISTED_URI = 65_536
# How long a list waits for documents that nobody has read yet.
LISTING_S = 2.0
# The first blocks of a chain: an index that begins there has seen every token.
_FIRST_BLOCKS = 1
# And one that is this close to the tip is not catching up.
_CLOSE_BLOCKS = 2


class NftContractReader(Protocol):
    async def tip(self, network: Network) -> int: ...

    async def read(
        self, network: Network, calls: Sequence[tuple[bytes, bytes]], *, block: int | None = None
    ) -> list[bytes | None]:
        """What each call (contract, calldata) returns; None where the contract refuses it."""
        ...


@dataclass(frozen=True, slots=True)
class DescribedNft:
    """What a document says, and how it was come by."""

    status: MetadataStatus
    metadata: Metadata = NOTHING

    def data(self) -> dict[str, Any]:
        found = self.metadata
        return {
            "name": found.name,
            "description": found.description,
            "image_url": found.image,
            "traits": [{"trait_type": trait.type, "value": trait.value} for trait in found.traits],
            "fetch_status": self.status,
        }


class NftMetadata:
    def __init__(
        self,
        contracts: NftContractReader,
        holdings: HoldingStore,
        fetcher: Fetcher,
        kept: DataCache,
        *,
        settings: NftSettings,
    ) -> None:
        self._contracts = contracts
        self._holdings = holdings
        self._fetcher = fetcher
        self._kept = kept
        self._settings = settings
        self._gateways = Gateways(settings.ipfs_gateway.rstrip("/"), settings.arweave_gateway.rstrip("/"))

    def __repr__(self) -> str:
        return f"<NftMetadata by {self._fetcher!r}>"

    async def read(self, network: Network, contract: bytes, token_id: int, *, refresh: bool = False) -> dict[str, Any]:
        """The contract's answer; NotFound where there is no such token."""
        block = await self._contracts.tip(network)
        calls = [(contract, question) for question in nfts.questions(token_id)]
        nft = nfts.answered(await self._contracts.read(network, calls, block=block))
        if nft is None:
            raise NotFound(f"there is no NFT contract at {address.checksum(contract)} on {network.id}")
        if nft.exists is False:
            raise _no_token(network, contract, token_id)
        owner = nft.owner
        if nft.standard == 1155:
            owner, block = await self._only_holder(network, contract, token_id, nft=nft, block=block)
        told = await self._described(network, contract, token_id, uri=nft.uri, refresh=refresh)
        image = told["image_url"]
        return {
            "contract": address.checksum(contract),
            "token_id": str(token_id),
            **told,
            "image_gateway_url": uris.over_http(image, self._gateways) if image else None,
            "standard": _STANDARDS[nft.standard],
            "owner": address.checksum(owner) if owner else None,
            "token_uri": _shown(nft.uri),
            "as_of_block": block,
        }

    async def _only_holder(
        self, network: Network, contract: bytes, token_id: int, *, nft: NftContractFacts, block: int
    ) -> tuple[bytes | None, int]:
        """Of an ERC-1155 token, its holder where there is exactly one; and the block at which that is true.

        The index knows holders. Whether it knows all of them depends on where it began, and on how far it is.
        """
        as_of = await self._holdings.as_of(network.id)
        if as_of is None or block - as_of.block > _CLOSE_BLOCKS:
            return None, block
        holders = await self._holdings.holders_of(network.id, contract, token_id, limit=2)
        knows_all = as_of.first_block <= _FIRST_BLOCKS
        if not holders and knows_all and nft.exists is None:
            raise _no_token(network, contract, token_id)
        is_only = len(holders) == 1 and (knows_all or holders[0].amount == nft.supply)
        return holders[0].holder if is_only else None, min(block, as_of.block)

    # Documents

    async def known(self, network: Network, tokens: Sequence[tuple[bytes, int]]) -> list[Mapping[str, Any] | None]:
        """Name and image of each (contract, token id), as far as they can be had soon."""
        found = dict(
            zip(tokens, await self._kept.get(network.id, _KIND, [_name(*token) for token in tokens]), strict=True)
        )
        missing = [token for token, told in found.items() if told is None]
        if missing:
            found |= await self._soon(network, missing)
        return [_listed(found[token]) for token in tokens]

    async def _soon(
        self, network: Network, tokens: Sequence[tuple[bytes, int]]
    ) -> dict[tuple[bytes, int], Mapping[str, Any] | None]:
        calls = [
            (contract, abi.call(signature, token_id))
            for contract, token_id in tokens
            for signature in ("tokenURI(uint256)", "uri(uint256)")
        ]
        answers = [abi.text(answer) for answer in await self._contracts.read(network, calls)]
        found: dict[tuple[bytes, int], Mapping[str, Any] | None] = dict.fromkeys(tokens)

        async def read(some: Sequence[tuple[tuple[bytes, int], str]]) -> None:
            for token, uri in some:
                found[token] = await self._described(network, *token, uri=uri)
                await asyncio.sleep(0)

        pairs = [
            (token, one or other or "") for token, one, other in zip(tokens, answers[::2], answers[1::2], strict=True)
        ]
        # Documents to fetch all at once. Those that are here one by one, and others may have their turn in between.
        here = [pair for pair in pairs if _LONGEST_SHOWN < len(pair[1]) <= _LONGEST_LISTED_URI]
        try:
            async with asyncio.timeout(LISTING_S), asyncio.TaskGroup() as group:
                group.create_task(read(here))
                for pair in pairs:
                    if len(pair[1]) <= _LONGEST_SHOWN:
                        group.create_task(read([pair]))
        except TimeoutError:
            await self._give_up(network, [token for token, told in found.items() if told is None])
        return found

    async def _give_up(self, network: Network, tokens: Sequence[tuple[bytes, int]]) -> None:
        """The next list does not wait for them again. Who asks for one of them does: the URI is another than none."""
        late = {_name(*token): {**DescribedNft("timeout").data(), "uri": ""} for token in tokens}
        await self._kept.put(network.id, _KIND, late, ttl_s=self._settings.retry_s)

    async def document(self, uri: str) -> dict[str, str] | None:
        """What the JSON that a URI leads to says in words: a collection's own, say."""

        async def make() -> dict[str, str] | None:
            _, body = await self._fetch(uri)
            return metadata.words(body)

        def ttl_s(told: dict[str, str] | None) -> float:
            return self._settings.retry_s if told is None else self._settings.keep_s

        found: dict[str, str] | None = await self._kept.once("web", _DOCUMENT, _digest(uri), make=make, ttl_s=ttl_s)
        return found

    async def _described(
        self, network: Network, contract: bytes, token_id: int, *, uri: str | None, refresh: bool = False
    ) -> dict[str, Any]:
        """From memory, unless the URI is another than it was."""
        if not uri or not uri.strip():
            return DescribedNft("none").data()
        whole = uris.with_id(uri, token_id)
        if len(whole) > _LONGEST_SHOWN:
            return (await self._read(whole)).data()
        name, digest = _name(contract, token_id), _digest(whole)
        kept = None if refresh else (await self._kept.get(network.id, _KIND, [name]))[0]
        if kept is not None and kept["uri"] == digest:
            return _without_uri(kept)

        async def make() -> dict[str, Any]:
            return {**(await self._read(whole)).data(), "uri": digest}

        told: dict[str, Any] = await self._kept.once(network.id, _KIND, name, make=make, ttl_s=self._ttl_s, fresh=True)
        return _without_uri(told)

    def _ttl_s(self, told: Mapping[str, Any]) -> float:
        return self._settings.keep_s if told["fetch_status"] == "ok" else self._settings.retry_s

    async def _read(self, uri: str) -> DescribedNft:
        """A second wall: a stranger's document that breaks our reading of it is only a bad document."""
        try:
            return await self._understood(uri)
        except Exception:
            log.exception("a document broke its reader", extra={"uri_length": len(uri)})
            return DescribedNft("invalid")

    async def _understood(self, uri: str) -> DescribedNft:
        fetched, body = await self._fetch(uri)
        if fetched.outcome != "ok":
            return DescribedNft(fetched.outcome)
        if fetched.media_type.startswith("image/"):
            return DescribedNft("ok", Metadata(image=await _apart(len(uri), lambda: uris.shown(uri))))
        found = await _apart(len(body), lambda: metadata.read(body))
        return DescribedNft("invalid") if found is None else DescribedNft("ok", found)

    async def _fetch(self, uri: str) -> tuple[Fetched, bytes]:
        most = self._settings.max_metadata_bytes
        if len(uri) > _LONGEST_ENCODING * most + _LONGEST_SHOWN:
            return Fetched("too_large"), b""
        place = await _apart(len(uri), lambda: uris.locate(uri, self._gateways))
        if place is None:
            return Fetched("invalid"), b""
        if isinstance(place, InlineDocument):
            is_large = len(place.body) > most
            return Fetched(
                "too_large" if is_large else "ok", media_type=place.media_type
            ), b"" if is_large else place.body
        fetched = await self._fetcher.get(place.url, own=place.own)
        return fetched, fetched.body


async def _apart(size: int, work: Callable[[], T]) -> T:
    """In a thread where there is much to do: nobody else is to wait for a stranger's megabyte, which may take 0.4 s."""
    return work() if size <= _LONGEST_LISTED_URI else await asyncio.to_thread(work)


def _name(contract: bytes, token_id: int) -> str:
    return f"{contract.hex()}:{token_id}"


def _digest(uri: str) -> str:
    return hashlib.sha256(uri.encode("utf-8", "replace")).hexdigest()


def _without_uri(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "uri"}


def _shown(uri: str | None) -> str | None:
    return None if uri is None or len(uri) > _LONGEST_SHOWN else display_text.cleaned(uri, _LONGEST_SHOWN)


def _listed(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    image = told["image_url"]
    return {"name": told["name"], "image_url": image if image and len(image) <= _LONGEST_LISTED else None}


def _no_token(network: Network, contract: bytes, token_id: int) -> NotFound:
    return NotFound(f"there is no token {token_id} at {address.checksum(contract)} on {network.id}")
