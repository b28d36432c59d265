"""The contracts of the development chain: their deployment, balances and addresses."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from proxy.dev.encoding import name_hash
from proxy.dev.funded_accounts import ALICE, BOB, CAROL, FUNDED, PAYMASTER_SIGNER
from proxy.dev.npm_packages import DEVNET
from proxy.dev.recipe import Recipe, RecipeStep

# The same addresses as on public chains.
MULTICALL = "0xcA11bde05977b3631167028862bE2a173976CA11"
NAME_REGISTRY = "0x00000000000C2E074eC69A0dFb2997BA6C7d2e1e"
# The salts that give EntryPoints their canonical addresses.
ENTRY_POINT_SALTS = {
    "0.6": bytes(32),
    "0.7": bytes.fromhex("90d8084deab30c2a37c45e8d47f49f2f7965183cb6990a98943ef94940681de3"),
    "0.8": bytes.fromhex("0a59dbff790c23c976a548690c27297883cc66b4c67024f9117b0238995e35e9"),
}
ETHER = 10**18
CID = "bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi"
UNSTAKE_DELAY_S = 86_400


@dataclass(frozen=True, slots=True)
class DevContracts:
    """The contracts as listed in the ready file. The defaults describe a chain without contracts."""

    tokens: list[dict[str, Any]] = field(default_factory=list)
    nfts: list[dict[str, Any]] = field(default_factory=list)
    price_feeds: list[dict[str, Any]] = field(default_factory=list)
    multicall: str | None = None
    ens: dict[str, Any] = field(default_factory=dict)
    entry_points: dict[str, str] = field(default_factory=dict)
    factories: dict[str, str] = field(default_factory=dict)
    paymasters: dict[str, str] = field(default_factory=dict)
    paymaster_signer: dict[str, str] = field(default_factory=dict)


def everything(home: Path = DEVNET) -> tuple[list[RecipeStep], DevContracts]:
    recipe = Recipe(home)
    recipe.create2_proxy()
    entry_points, factories, paymasters = _operations(recipe)
    multicall = recipe.place("Multicall3", MULTICALL)
    tokens = _tokens(recipe)
    contracts = DevContracts(
        tokens=tokens,
        nfts=_nfts(recipe),
        price_feeds=_price_feeds(recipe, {token["symbol"]: token["address"] for token in tokens}),
        multicall=multicall,
        ens=_names(recipe),
        entry_points=entry_points,
        factories=factories,
        paymasters=paymasters,
        paymaster_signer=asdict(PAYMASTER_SIGNER),
    )
    return recipe.steps, contracts


def _operations(recipe: Recipe) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Deploy three versions of ERC-4337, each with a wallet factory and a funded paymaster."""
    entry_points, factories, paymasters = {}, {}, {}
    for version, salt in ENTRY_POINT_SALTS.items():
        entry_point = recipe.create2(f"EntryPoint-{version}", salt=salt)
        entry_points[version] = entry_point
        factories[version] = recipe.create2(f"SimpleAccountFactory-{version}", entry_point)
        paymaster = recipe.create(f"VerifyingPaymaster-{version}", entry_point, PAYMASTER_SIGNER.address)
        recipe.call(paymaster, "deposit()", value_wei=100 * ETHER)
        recipe.call(paymaster, "addStake(uint32)", UNSTAKE_DELAY_S, value_wei=ETHER)
        paymasters[version] = paymaster
    return entry_points, factories, paymasters


# Tokens


def _tokens(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        _coin(recipe),
        _six_decimals(recipe),
        _huge(recipe),
        *_odd(recipe),
        _wrapped(recipe),
        _rebasing(recipe),
    ]


def _token(kind: str, address: str, name: str | None, symbol: str | None, decimals: int | None) -> dict[str, Any]:
    """Describe a token as its contract does; None for values that the contract does not return."""
    return {"kind": kind, "address": address, "name": name, "symbol": symbol, "decimals": decimals}


def _mint(recipe: Recipe, token: str, *shares: tuple[str, int]) -> None:
    for holder, amount in shares:
        recipe.call(token, "mint(address,uint256)", holder, amount)


def _coin(recipe: Recipe) -> dict[str, Any]:
    token = recipe.create("Coin", "Penstock Token", "PEN", 18)
    _mint(recipe, token, (FUNDED.address, 10**6 * ETHER), (ALICE.address, 25 * 10**20 + 1), (BOB.address, 1))
    recipe.call(token, "transfer(address,uint256)", CAROL.address, 100 * ETHER, sender=ALICE)
    return _token("erc20", token, "Penstock Token", "PEN", 18)


def _six_decimals(recipe: Recipe) -> dict[str, Any]:
    """A token with six decimals. Bob has transferred all of his."""
    token = recipe.create("Coin", "Dev Dollar", "DUSD", 6)
    _mint(recipe, token, (FUNDED.address, 10**12), (ALICE.address, 1_234_567_890), (BOB.address, 50_000_000))
    recipe.call(token, "transfer(address,uint256)", CAROL.address, 50_000_000, sender=BOB)
    return _token("erc20", token, "Dev Dollar", "DUSD", 6)


def _huge(recipe: Recipe) -> dict[str, Any]:
    token = recipe.create("Coin", "Huge Coin", "HUGE", 18)
    _mint(recipe, token, (CAROL.address, 2**256 - 1))
    return _token("erc20", token, "Huge Coin", "HUGE", 18)


def _odd(recipe: Recipe) -> list[dict[str, Any]]:
    old, mute, odd = recipe.create("OldCoin"), recipe.create("MuteCoin"), recipe.create("OddCoin")
    for token in (old, mute, odd):
        _mint(recipe, token, (FUNDED.address, 7 * ETHER), (ALICE.address, 5 * ETHER))
    for topics, size in ((1, 96), (2, 64), (3, 0), (3, 31), (3, 64), (4, 0), (4, 32)):
        recipe.call(odd, "pretend(uint256,bytes)", topics, b"\xff" * size)
    return [
        _token("bytes32", old, "Old Coin", "OLD", 18),
        _token("mute", mute, None, None, None),
        _token("odd", odd, "Odd\0\a\x1b[31m Coin\u202e\n", "O\0DD\u200b", None),
    ]


def _wrapped(recipe: Recipe) -> dict[str, Any]:
    token = recipe.create("WrappedEther")
    recipe.call(token, "deposit()", sender=ALICE, value_wei=3 * ETHER)
    recipe.call(token, "withdraw(uint256)", ETHER, sender=ALICE)
    recipe.call(token, "deposit()", sender=BOB, value_wei=2 * ETHER)
    recipe.call(token, "transfer(address,uint256)", CAROL.address, ETHER // 2, sender=BOB)
    return _token("weth", token, "Wrapped Ether", "WETH", 18)


def _rebasing(recipe: Recipe) -> dict[str, Any]:
    token = recipe.create("RebasingCoin")
    _mint(recipe, token, (FUNDED.address, 100 * ETHER), (ALICE.address, 50 * ETHER))
    recipe.call(token, "rebase(uint256)", 110)
    return _token("rebasing", token, "Rebasing Coin", "RBS", 18)


# NFTs


def _nfts(recipe: Recipe) -> list[dict[str, Any]]:
    return [_pictures(recipe), _old_pictures(recipe), _items(recipe), _inline_items(recipe)]


def _pictures(recipe: Recipe) -> dict[str, Any]:
    """An ERC-721 collection with every common kind of token URI, including one with a very large token id.

    Token 2 has been transferred and token 8 burned.
    """
    pictures = recipe.create("Pictures")
    uris = {
        1: _encoded_picture(),
        2: f"ipfs://{CID}/2.json",
        3: "this is no URI",
        4: f"data:application/json,{orjson.dumps({'name': 'Plain', 'attributes': {'depth': 3}}).decode()}",
        5: "",
        6: "http://127.0.0.1:1/6.json",
        7: "ar://bNbA3TEQVL60xlgCcqdz4ZPHFZ711cZ3hmkpGttDt_U/7.json",
        2**255 + 7: _encoded_picture(),
    }
    holders = (FUNDED, ALICE, BOB)
    for at, (token_id, uri) in enumerate(uris.items()):
        holder = holders[at % len(holders)].address
        recipe.call(pictures, "mint(address,uint256,string)", holder, token_id, uri)
    recipe.call(pictures, "transferFrom(address,address,uint256)", ALICE.address, CAROL.address, 2, sender=ALICE)
    recipe.call(pictures, "mint(address,uint256,string)", ALICE.address, 8, "ipfs://burned")
    recipe.call(pictures, "burn(uint256)", 8, sender=ALICE)
    ids = [{"token_id": str(token_id), "uri": uri} for token_id, uri in uris.items()]
    return _collection("erc721", pictures, "Penstock Pictures", "PIC", ids)


def _encoded_picture() -> str:
    """Return a data URI of base64 JSON that contains a base64 SVG."""
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><path d="M0 4h8" stroke="#06c"/></svg>'
    attributes = [
        {"trait_type": "Colour", "value": "blue"},
        {"trait_type": "Width", "value": 8, "display_type": "number"},
    ]
    described = {
        "name": "A Pipe",
        "description": "A line from left to right.",
        "image": f"data:image/svg+xml;base64,{b64encode(drawing).decode()}",
        "attributes": attributes,
    }
    return f"data:application/json;base64,{b64encode(orjson.dumps(described)).decode()}"


def _old_pictures(recipe: Recipe) -> dict[str, Any]:
    pictures = recipe.create("OldPictures")
    for token_id, holder in ((1, ALICE), (2, BOB)):
        recipe.call(pictures, "mint(address,uint256)", holder.address, token_id)
    recipe.call(pictures, "transferFrom(address,address,uint256)", ALICE.address, BOB.address, 1, sender=ALICE)
    ids = [{"token_id": "1", "uri": None}, {"token_id": "2", "uri": None}]
    return _collection("erc721-old", pictures, "Old Pictures", "OLDPIC", ids)


def _items(recipe: Recipe) -> dict[str, Any]:
    uri = f"ipfs://{CID}/{{id}}.json"
    items = recipe.create("Items", "Penstock Items", "ITEM", uri)
    recipe.call(items, "mintBatch(address,uint256[],uint256[])", ALICE.address, [1, 2, 3], [10, 20, 1])
    recipe.call(items, "mint(address,uint256,uint256)", FUNDED.address, 1, 5)
    one = "safeTransferFrom(address,address,uint256,uint256,bytes)"
    recipe.call(items, one, ALICE.address, BOB.address, 1, 4, b"", sender=ALICE)
    many = "safeBatchTransferFrom(address,address,uint256[],uint256[],bytes)"
    recipe.call(items, many, ALICE.address, CAROL.address, [2, 3], [5, 1], b"", sender=ALICE)
    ids = [{"token_id": str(token_id), "uri": uri} for token_id in (1, 2, 3)]
    return _collection("erc1155", items, "Penstock Items", "ITEM", ids)


def _inline_items(recipe: Recipe) -> dict[str, Any]:
    """An ERC-1155 collection with inline metadata that contains {id}, so substitution works without a network."""
    uri = 'data:application/json;utf8,{"name":"Item {id}","properties":{"weight":2}}'
    items = recipe.create("Items", "Inline Items", "INLINE", uri)
    recipe.call(items, "mint(address,uint256,uint256)", ALICE.address, 0x4CCE0, 3)
    return _collection("erc1155", items, "Inline Items", "INLINE", [{"token_id": str(0x4CCE0), "uri": uri}])


def _collection(kind: str, address: str, name: str, symbol: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": kind, "address": address, "name": name, "symbol": symbol, "tokens": tokens}


# Prices and names


def _price_feeds(recipe: Recipe, tokens: dict[str, str]) -> list[dict[str, Any]]:
    """Deploy price feeds: two current ones, one with 18 decimals, one that is years old, and one without a price."""
    feeds = []
    for symbol, decimals, answer, updated_at in (
        ("ETH", 8, 3_000_12345678, 0),
        ("DUSD", 8, 99_980_000, 0),
        ("PEN", 18, 1_250_000_000_000_000_001, 0),
        ("OLD", 8, 2_00000000, 1_600_000_000),
        ("RBS", 8, 0, 0),
    ):
        feed = recipe.create("PriceFeed", f"{symbol} / USD", decimals, answer)
        if updated_at:
            recipe.call(feed, "set(int256,uint256)", answer, updated_at)
        facts = {"symbol": symbol, "token": tokens.get(symbol), "decimals": decimals, "answer": str(answer)}
        feeds.append({"address": feed, **facts, "updated_at": updated_at or None})
    return feeds


def _names(recipe: Recipe) -> dict[str, Any]:
    """Deploy ENS with two names that resolve in both directions."""
    registry = recipe.place("NameRegistry", NAME_REGISTRY)
    resolver = recipe.create("NameResolver")
    named = {"alice.eth": ALICE.address, "bob.eth": BOB.address}
    for name, address in named.items():
        node, reverse = name_hash(name), name_hash(f"{address[2:].lower()}.addr.reverse")
        recipe.call(registry, "setResolver(bytes32,address)", node, resolver)
        recipe.call(resolver, "setAddr(bytes32,address)", node, address)
        recipe.call(registry, "setResolver(bytes32,address)", reverse, resolver)
        recipe.call(resolver, "setName(bytes32,string)", reverse, name)
    return {"registry": registry, "resolver": resolver, "names": named}
