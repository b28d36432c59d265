"""One NFT: its owner and URI from the contract, and its metadata document from that URI.

The contract is read every time, because owners change. The document is untrusted: it is fetched through the guard, cached, and
fetched again if the URI changes or a client requests a refresh. A document that cannot be fetched is not an error: its fields
are null, and `fetch_status` gives the reason.
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
from proxy.request_threads import request_threads
from proxy.settings import NftSettings
from proxy.store.postgres.holdings import HoldingStore
from proxy.store.valkey.cache import DataCache
from proxy.turn_queue import next_turn
from proxy.wire.fetcher import Fetched, Fetcher, FetchOutcome

log = logging.getLogger("penstock.nfts")

T = TypeVar("T")

MetadataStatus = FetchOutcome | Literal["none"]

_KIND, _DOCUMENT = "nft", "document"
_STANDARDS = {721: "ERC721", 1155: "ERC1155"}
# A longer URI contains the document itself (a data: URI) and is not included in the reply.
_MAX_SHOWN_URI = 2048
# A byte of an inline document takes at most this many characters of its URI. A URI that is longer than the largest document
# would need is not decoded.
_MAX_CHARS_PER_BYTE = 3
# In a list of a hundred tokens, longer images are left out, and inline documents in longer URIs are not decoded, because they
# would delay the whole list.
_MAX_LISTED_IMAGE = 16_384
_MAX_LISTED_TRAITS = 4_096
_MAX_LISTED_URI = 65_536
# How long a list waits for documents that are not cached yet.
LISTING_S = 2.0
# An index that begins at one of the first blocks of a chain has seen every token.
_FIRST_BLOCKS = 1
# An index this close to the tip is not catching up.
_CLOSE_BLOCKS = 2


class NftContractReader(Protocol):
    async def tip(self, network: Network) -> int: ...

    async def read(
        self, network: Network, calls: Sequence[tuple[bytes, bytes]], *, block: int | None = None
    ) -> list[bytes | None]:
        """The result of each call (contract, calldata); None if the contract reverts."""
        ...


@dataclass(frozen=True, slots=True)
class DescribedNft:
    """The metadata in a document, and the outcome of fetching it."""

    status: MetadataStatus
    metadata: Metadata = NOTHING

    def data(self) -> dict[str, Any]:
        parsed = self.metadata
        return {
            "name": parsed.name,
            "description": parsed.description,
            "image_url": parsed.image,
            "traits": [{"trait_type": trait.type, "value": trait.value} for trait in parsed.traits],
            "fetch_status": self.status,
        }


class NftMetadata:
    def __init__(
        self,
        contracts: NftContractReader,
        holdings: HoldingStore,
        fetcher: Fetcher,
        cache: DataCache,
        *,
        settings: NftSettings,
    ) -> None:
        self._contracts = contracts
        self._holdings = holdings
        self._fetcher = fetcher
        self._cache = cache
        self._settings = settings
        self._gateways = Gateways(settings.ipfs_gateway.rstrip("/"), settings.arweave_gateway.rstrip("/"))

    def __repr__(self) -> str:
        return f"<NftMetadata by {self._fetcher!r}>"

    async def read(self, network: Network, contract: bytes, token_id: int, *, refresh: bool = False) -> dict[str, Any]:
        """The NFT in the form of the API spec. Raises NotFound if there is no such token."""
        block = await self._contracts.tip(network)
        calls = [(contract, data) for data in nfts.questions(token_id)]
        nft = nfts.answered(await self._contracts.read(network, calls, block=block))
        if nft is None:
            raise NotFound(f"there is no NFT contract at {address.checksum(contract)} on {network.id}")
        if nft.exists is False:
            raise _no_token(network, contract, token_id)
        owner = nft.owner
        if nft.standard == 1155:
            owner, block = await self._only_holder(network, contract, token_id, nft=nft, block=block)
        described = await self._described(network, contract, token_id, uri=nft.uri, refresh=refresh)
        image = described["image_url"]
        return {
            "contract": address.checksum(contract),
            "token_id": str(token_id),
            **described,
            "image_gateway_url": uris.over_http(image, self._gateways) if image else None,
            "standard": _STANDARDS[nft.standard],
            "owner": address.checksum(owner) if owner else None,
            "token_uri": _shown_uri(nft.uri),
            "as_of_block": block,
        }

    async def _only_holder(
        self, network: Network, contract: bytes, token_id: int, *, nft: NftContractFacts, block: int
    ) -> tuple[bytes | None, int]:
        """The holder of an ERC-1155 token if there is exactly one, and the block at which that is true.

        Holders come from the index. Whether it has all of them depends on its first block and on how far it lags.
        """
        as_of = await self._holdings.as_of(network.id)
        if as_of is None or block - as_of.block > _CLOSE_BLOCKS:
            return None, block
        holders = await self._holdings.holders_of(network.id, contract, token_id, limit=2)
        is_complete = as_of.first_block <= _FIRST_BLOCKS
        if not holders and is_complete and nft.exists is None:
            raise _no_token(network, contract, token_id)
        is_only = len(holders) == 1 and (is_complete or holders[0].amount == nft.supply)
        return holders[0].holder if is_only else None, min(block, as_of.block)

    # Documents

    async def known(self, network: Network, tokens: Sequence[tuple[bytes, int]]) -> list[Mapping[str, Any] | None]:
        """The metadata of each (contract, token id), without long parts; None where it cannot be read within `LISTING_S`."""
        cached = await self._cache.get(network.id, _KIND, [_name(*token) for token in tokens])
        by_token = dict(zip(tokens, cached, strict=True))
        missing = [token for token, fields in by_token.items() if fields is None]
        if missing:
            by_token |= await self._read_in_time(network, missing)
        return [self._listed(by_token[token]) for token in tokens]

    def _listed(self, fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if fields is None:
            return None
        image, traits = fields["image_url"], fields["traits"]
        image = image if image and len(image) <= _MAX_LISTED_IMAGE else None
        length = sum(len(each["trait_type"] or "") + len(each["value"] or "") for each in traits)
        return {
            **{name: fields[name] for name in ("name", "description", "fetch_status")},
            "image_url": image,
            "image_gateway_url": uris.over_http(image, self._gateways) if image else None,
            "traits": traits if length <= _MAX_LISTED_TRAITS else None,
        }

    async def _read_in_time(
        self, network: Network, tokens: Sequence[tuple[bytes, int]]
    ) -> dict[tuple[bytes, int], Mapping[str, Any] | None]:
        calls = [
            (contract, abi.call(signature, token_id))
            for contract, token_id in tokens
            for signature in ("tokenURI(uint256)", "uri(uint256)")
        ]
        replies = [abi.text(reply) for reply in await self._contracts.read(network, calls)]
        by_token: dict[tuple[bytes, int], Mapping[str, Any] | None] = dict.fromkeys(tokens)

        async def read(some: Sequence[tuple[tuple[bytes, int], str]]) -> None:
            for token, uri in some:
                by_token[token] = await self._described(network, *token, uri=uri)
                await next_turn()

        pairs = [
            (token, one or other or "") for token, one, other in zip(tokens, replies[::2], replies[1::2], strict=True)
        ]
        # Remote documents are fetched concurrently. Inline ones are decoded one by one, yielding to other tasks in between.
        inline = [pair for pair in pairs if _MAX_SHOWN_URI < len(pair[1]) <= _MAX_LISTED_URI]
        try:
            async with asyncio.timeout(LISTING_S), asyncio.TaskGroup() as group:
                group.create_task(read(inline))
                for pair in pairs:
                    if len(pair[1]) <= _MAX_SHOWN_URI:
                        group.create_task(read([pair]))
        except TimeoutError:
            await self._cache_timeouts(network, [token for token, fields in by_token.items() if fields is None])
        return by_token

    async def _cache_timeouts(self, network: Network, tokens: Sequence[tuple[bytes, int]]) -> None:
        """Cache the timeouts, so that the next list does not wait for these documents again. A request for a single token
        does, since the cached URI is empty and differs from the token's."""
        late = {_name(*token): {**DescribedNft("timeout").data(), "uri": ""} for token in tokens}
        await self._cache.put(network.id, _KIND, late, ttl_s=self._settings.retry_s)

    async def document(self, uri: str) -> dict[str, str] | None:
        """The text members of the JSON document at a URI, such as a collection's metadata."""

        async def make() -> dict[str, str] | None:
            _, body = await self._fetch(uri)
            return metadata.words(body)

        def ttl_s(members: dict[str, str] | None) -> float:
            return self._settings.retry_s if members is None else self._settings.keep_s

        words: dict[str, str] | None = await self._cache.once("web", _DOCUMENT, _digest(uri), make=make, ttl_s=ttl_s)
        return words

    async def _described(
        self, network: Network, contract: bytes, token_id: int, *, uri: str | None, refresh: bool = False
    ) -> dict[str, Any]:
        """The fields from the document, from the cache unless the URI has changed."""
        if not uri or not uri.strip():
            return DescribedNft("none").data()
        whole = uris.with_id(uri, token_id)
        if len(whole) > _MAX_SHOWN_URI:
            return (await self._read(whole)).data()
        name, digest = _name(contract, token_id), _digest(whole)
        cached = None if refresh else (await self._cache.get(network.id, _KIND, [name]))[0]
        if cached is not None and cached["uri"] == digest:
            return _without_uri(cached)

        async def make() -> dict[str, Any]:
            return {**(await self._read(whole)).data(), "uri": digest}

        fields: dict[str, Any] = await self._cache.once(
            network.id, _KIND, name, make=make, ttl_s=self._ttl_s, fresh=True
        )
        return _without_uri(fields)

    def _ttl_s(self, fields: Mapping[str, Any]) -> float:
        return self._settings.keep_s if fields["fetch_status"] == "ok" else self._settings.retry_s

    async def _read(self, uri: str) -> DescribedNft:
        """A second line of defence: an untrusted document that makes our parser fail counts as invalid."""
        try:
            return await self._parsed(uri)
        except Exception:
            log.exception("an NFT document could not be parsed", extra={"uri_length": len(uri)})
            return DescribedNft("invalid")

    async def _parsed(self, uri: str) -> DescribedNft:
        fetched, body = await self._fetch(uri)
        if fetched.outcome != "ok":
            return DescribedNft(fetched.outcome)
        if fetched.media_type.startswith("image/"):
            return DescribedNft("ok", Metadata(image=await _off_loop(len(uri), lambda: uris.shown(uri))))
        described = await _off_loop(len(body), lambda: metadata.read(body))
        return DescribedNft("invalid") if described is None else DescribedNft("ok", described)

    async def _fetch(self, uri: str) -> tuple[Fetched, bytes]:
        most = self._settings.max_metadata_bytes
        if len(uri) > _MAX_CHARS_PER_BYTE * most + _MAX_SHOWN_URI:
            return Fetched("too_large"), b""
        place = await _off_loop(len(uri), lambda: uris.locate(uri, self._gateways))
        if place is None:
            return Fetched("invalid"), b""
        if isinstance(place, InlineDocument):
            if len(place.body) > most:
                return Fetched("too_large", media_type=place.media_type), b""
            return Fetched("ok", media_type=place.media_type), place.body
        fetched = await self._fetcher.get(place.url, own=place.own)
        return fetched, fetched.body


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Run large work in a thread, so that it does not block the event loop: a megabyte may take 0.4 s."""
    return work() if size <= _MAX_LISTED_URI else await request_threads.run(work)


def _name(contract: bytes, token_id: int) -> str:
    return f"{contract.hex()}:{token_id}"


def _digest(uri: str) -> str:
    return hashlib.sha256(uri.encode("utf-8", "replace")).hexdigest()


def _without_uri(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "uri"}


def _shown_uri(uri: str | None) -> str | None:
    return None if uri is None or len(uri) > _MAX_SHOWN_URI else display_text.cleaned(uri, _MAX_SHOWN_URI)


def _no_token(network: Network, contract: bytes, token_id: int) -> NotFound:
    return NotFound(f"there is no token {token_id} at {address.checksum(contract)} on {network.id}")
