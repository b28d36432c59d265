"""No chain's name in the code: a chain is a file in config/chains, and the flow never asks which one it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from proxy.settings import load_tables
from tests.house.source import modules, ring_of

CHAINS = load_tables().chains.chains
NETWORKS = {network for chain in CHAINS.values() for network in chain.networks}
# Where names belong: chains knows families by their kin, and dev runs one chain of its own.
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
