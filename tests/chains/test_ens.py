"""ENS names: published hashes, and normalisation against ENSIP-15's validation tests and web3's implementation."""

from __future__ import annotations

import pytest
from ens import utils as web3_ens  # type: ignore[import-untyped]
from ens.exceptions import InvalidName  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

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


# From the validation tests that ENSIP-15 refers to (adraffy/ens-normalize.js, validate/custom-tests.json).
@pytest.mark.parametrize(
    ("label", "normalised"),
    [
        ("vitalik", "vitalik"),
        ("bRAnTlY", "brantly"),
        ("abcdefghijklmnopqrstuvwxyz-0123456789", "abcdefghijklmnopqrstuvwxyz-0123456789"),
        ("_____a", "_____a"),
        ("test-", "test-"),
        ("-test", "-test"),
        ("\u00d6bb", "\u00f6bb"),
        ("\u00df", "\u00df"),
        ("\u03c2", "\u03c2"),
        ("\u2167", "viii"),
        ("\u24c2\ufe0f", "m"),
        ("\u00bd", "1\u20442"),
        ("\u9ed1a8", "\u9ed1a8"),
        ("a'a\u2019a", "a\u2019a\u2019a"),
        ("\ufe0e\ufe0fa", "a"),
        ("0\ufe0f\u20e31\ufe0f\u20e3", "0\u20e31\u20e3"),
        ("a\u2010\u2212b", "a--b"),
        ("$\u20ac\u20bf", "$\u20ac\u20bf"),
        ("\U0001f1fa\U0001f1f8", "\U0001f1fa\U0001f1f8"),
        ("xn--\U0001f4a9", "xn--\U0001f4a9"),
        ("\U0001f4a9\ufe0f", "\U0001f4a9"),
        ("rainbow\U0001f308", "rainbow\U0001f308"),
        ("\u06f0\u06f1\u06f8", "\u0660\u0661\u0668"),
    ],
)
def test_name_is_normalised_as_ensip_15_requires(label: str, normalised: str) -> None:
    assert ens.normalised(f"{label}.eth") == f"{normalised}.eth"


@pytest.mark.parametrize(
    "text",
    [
        *(".eth", "eth.", "...eth", "a\uff0eeth.eth", "te st.eth", " test.eth", "test\u200d.eth", "\u200dtest.eth"),
        *("'a.eth", "a\u2019.eth", "a'\u2019a.eth", "a\u00b7b.eth", "a_b.eth", "\u0303.eth", "a\u0303\u0303.eth"),
        *("\U0001f4a9\u0303.eth", "xn--ls8h.eth", "te--st.eth", "\U0001f4a9\u200d\U0001f4a9.eth"),
        *("\u278a.eth", "l\u00b7l.eth", "\U0001f1e6.eth", "0\u0445.eth", "\u0430\u0440\u0440\u04cf\u0435.eth", "\u0450.eth"),
        # Beyond the published ones: Cyrillic and Greek letters that look like Latin ones.
        *("\u0430lice.eth", "alice.\u0435th", "\u0440\u0430\u0443\u0440\u0430l.eth", "\u03bfpensea.eth"),
    ],
)  # fmt: skip
def test_name_that_ensip_15_rejects_is_refused(text: str) -> None:
    with pytest.raises(ens.BadName):
        ens.normalised(text)


@pytest.mark.parametrize("text", ["", ".", "alice", "a\0.eth", "a/b.eth", "a" * 252 + ".eth", "\u00df" * 252 + ".eth"])
def test_text_that_is_not_a_name_is_refused(text: str) -> None:
    with pytest.raises(ens.BadName):
        ens.normalised(text)


_LETTERS = st.sampled_from(
    "abcXYZ019-_$'. \u00e9\u00c9\u0430\u03b1\u4e2d\u200d\ufe0f\u2019\u20e3\u0301\U0001f308\U0001f6b4\u2642"
)


@given(st.text(_LETTERS, min_size=1, max_size=8))
def test_names_are_normalised_as_by_web3(label: str) -> None:
    """An independent implementation, of an older version of Unicode: the letters are in both."""
    text = f"{label}.eth"
    try:
        expected = web3_ens.normalize_name(text)
    except InvalidName:
        with pytest.raises(ens.BadName):
            ens.normalised(text)
    else:
        assert ens.normalised(text) == expected
