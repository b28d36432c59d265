"""ENS names: the published hashes, and which texts are names."""

from __future__ import annotations

import pytest

from proxy.chains.evm import ens


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("", "0000000000000000000000000000000000000000000000000000000000000000"),
        ("eth", "93cdeb708b7545dc668eb9280176169d1c33cfd8ed6f04690a0bcc88a93fc4ae"),
        ("foo.eth", "de9b09fd7c5f901e23a3f19fecc54828e9c848539801e86591bd9801b019f84f"),
    ],
)
def test_hashes_are_those_of_the_proposal(name: str, node: str) -> None:
    """EIP-137, "namehash algorithm"."""
    assert ens.namehash(name).hex() == node


def test_calls_have_the_selectors_of_the_proposal() -> None:
    node = ens.namehash("eth")
    assert ens.ask_registry(node) == bytes.fromhex("0178b8bf") + node
    assert ens.ask_resolver(node) == bytes.fromhex("3b3b57de") + node


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("alice.eth", "alice.eth"),
        ("ALICE.Eth", "alice.eth"),
        ("a.b.c.eth", "a.b.c.eth"),
        ("_dnslink.alice.eth", "_dnslink.alice.eth"),
        ("a-b.eth", "a-b.eth"),
        ("1.eth", "1.eth"),
        ("example.com", "example.com"),
        ("a" * 251 + ".eth", "a" * 251 + ".eth"),
    ],
)
def test_plain_name_is_taken_in_lower_case(text: str, name: str) -> None:
    assert ens.normalised(text) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "alice", "alice.", ".eth", "a..eth", "a b.eth", "a\0.eth", "al_ice.eth", "xn--a.eth", "ab--c.eth"),
        *("a'b.eth", "\u0430lice.eth", "alice.\u0435th", "ali\u200dce.eth", "\ufb01.eth", "\uff11.eth", "🚴.eth", "ß.eth"),
        *("\u212a.eth", "a" * 252 + ".eth", "a/b.eth"),
    ],
)  # fmt: skip
def test_what_is_not_plainly_a_name_is_refused(text: str) -> None:
    with pytest.raises(ens.BadName):
        ens.normalised(text)
