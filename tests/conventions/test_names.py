"""Names: no chain's name in the code, since a chain is a file in config/chains; and one name for one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.conventions.source import PACKAGE, modules, ring_of
from tests.shipped_tables import TABLES

CHAINS = TABLES.chains.chains
NETWORKS = {network for chain in CHAINS.values() for network in chain.networks}
# Rings that may name chains: the families, and dev, which runs its own chain.
MAY_NAME = {"chains", "dev"}
# `dev` is also the name of a command and of a setting.
MAY_SAY_DEV = {*MAY_NAME, "settings", "commands", "__main__"}
# A name as a word, alone or with its network: not `base-uri`, not `database`, but `base`, `base/mainnet`, `base-sepolia`.
_WORD = re.compile(rf"(?<![\w-])({'|'.join(CHAINS)})(?:-(?:{'|'.join(NETWORKS)}))?(?![\w-])", re.IGNORECASE)


def prose(tree: ast.Module) -> set[int]:
    """The strings that are written for people: docstrings, and the help and description of a command's arguments."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description", "metavar"):
            found |= {id(part) for part in ast.walk(node.value)}
    return found


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    skipped = prose(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in skipped:
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            for word in _WORD.finditer(text):
                yield node.lineno, word[1].lower()


def test_modules_name_no_chain() -> None:
    found = [
        f"{module}:{line} names {name}"
        for module, tree in modules().items()
        if ring_of(module) not in MAY_NAME
        for line, name in names_in(tree)
        if not (name == "dev" and ring_of(module) in MAY_SAY_DEV)
    ]
    assert not found


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('x = "ethereum"', ["ethereum"]),
        ('x = "Ethereum/mainnet"', ["ethereum"]),
        ('x = f"{y}/base-sepolia"', ["base"]),
        ('x = {b"solana": 1}', ["solana"]),
        ('if chain in ("polygon", "bsc"): pass', ["polygon", "bsc"]),
        ('x = "base-uri database debased"', []),
        ('"""Not ethereum."""', []),
        ("# ethereum", []),
        ('add(help="such as ethereum")', []),
        ("ethereum = 1", []),
    ],
)
def test_this_test_sees_what_it_should(code: str, names: list[str]) -> None:
    assert sorted(name for _, name in names_in(ast.parse(code))) == sorted(names)


# One name, one thing

# Class and type names that two or more modules of proxy/ define.
SHARED_TYPES: dict[str, str] = {
    "_Transaction": "private: the few JSON members of a transaction that each module reads",
}
# File names that occur in several packages because they are about the same thing.
SHARED_STEMS: dict[str, str] = {
    "accounts": "customers' accounts: command, service and composition",
    "address": "the address of a chain family, one for each; and the address of an upstream",
    "admin": "operators' accounts: their command and their endpoints",
    "alerts": "alerts of accounts: decisions, store and REST resource",
    "announcements": "notices by operators: command, endpoints, service and store",
    "background": "the background process: its command and its composition",
    "blocks": "blocks of a network: fetched for the feed, and recorded in the store",
    "contradictions": "contradicted replies of upstreams: values, command, endpoint, service and store",
    "deliveries": "webhook deliveries: the REST resource and its store",
    "fleet": "the state of workers and upstreams: decisions, store and service",
    "gas": "gas prices: REST resource, service and composition",
    "holdings": "token balances: decisions and store",
    "keys": "API keys: command and store",
    "mails": "mails to customers: service and store",
    "methods": "the method table of a chain family, one for each",
    "migrate": "migrations: command and store",
    "networks": "the networks of the data plane, and their composition",
    "nfts": "NFTs: REST resource and the EVM's standards",
    "operations": "user operations: command, store and the EVM's rules",
    "paymaster": "paymasters: the ERC-7677 endpoint and the contract's data",
    "policies": "gas policies: service and store",
    "quotas": "daily quotas: service and store",
    "refusals": "refused sponsorships: service and store",
    "sessions": "dashboard sessions: decisions and store",
    "sign_in": "signing in to the dashboard: endpoints and service",
    "tokens": "tokens: REST resource and Solana's programs",
    "usage": "usage counts: decisions, service and store",
    "wallets": "smart wallets: REST resource, service and store",
    "transfers": "the history of transfers: REST resource and store",
    "webhooks": "webhooks: REST resource, service, store, command and composition",
    "worker": "the worker process: its command and its code",
}
_TYPE_NAME = re.compile(r"_?[A-Z][a-z]\w*")


def types_in(tree: ast.Module) -> set[str]:
    """Classes and type aliases of a module. Constants are in capitals."""
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {each.id for each in targets if isinstance(each, ast.Name) and _TYPE_NAME.fullmatch(each.id)}
    return found


def recurring(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that more than one module has, with these modules."""
    places: dict[str, list[str]] = {}
    for name, module in names:
        places.setdefault(name, []).append(module)
    return {name: found for name, found in places.items() if len(found) > 1}


def recurring_types() -> dict[str, list[str]]:
    return recurring((name, module) for module, tree in modules().items() for name in types_in(tree))


def recurring_stems() -> dict[str, list[str]]:
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    return recurring((path.stem, str(path)) for path in files)


def test_type_name_is_defined_once_unless_the_table_gives_the_reason() -> None:
    assert not {name: places for name, places in recurring_types().items() if name not in SHARED_TYPES}


def test_file_name_is_used_once_unless_the_table_gives_the_reason() -> None:
    assert not {name: places for name, places in recurring_stems().items() if name not in SHARED_STEMS}


def test_tables_list_no_name_that_is_unique_by_now() -> None:
    """Remove such a name from its table."""
    assert not SHARED_TYPES.keys() - recurring_types().keys()
    assert not SHARED_STEMS.keys() - recurring_stems().keys()
