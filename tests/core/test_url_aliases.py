"""Patterns of URLs: what they match, and which clash."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from proxy.core.url_aliases import RequestKind, SplitUrl, UrlAlias, UrlAliases, UrlMeaning, UrlPattern, clashes

TAKEN = frozenset(("dkey", "network"))
NETWORKS = {"eth": "ethereum/mainnet", "eth-sepolia": "ethereum/sepolia"}


def alias(*patterns: tuple[str, str], networks: Mapping[str, str] = NETWORKS, name: str = "a") -> UrlAlias:
    found = tuple(UrlPattern.of(path, host=host, place=f"{name}.toml:{n}") for n, (host, path) in enumerate(patterns))
    return UrlAlias(name, found, networks.get, networks)


def read(found: UrlAlias, host: str, target: str, kind: RequestKind = "call") -> UrlMeaning | None:
    path, _, query = target.partition("?")
    pairs = [(name, value) for name, _, value in (each.partition("=") for each in query.split("&") if each)]
    return UrlAliases([found]).read(SplitUrl(host.split("."), path.split("/")[1:], pairs), kind)


@pytest.mark.parametrize(
    ("host", "path", "given_host", "given", "expected"),
    [
        ("", "/x/{network}/{key}", "h", "/x/eth/k", UrlMeaning("ethereum/mainnet", "k")),
        ("", "/x/{network}/{key}", "h", "/x/eth/k?a=b", UrlMeaning("ethereum/mainnet", "k")),
        ("", "/x/{network}/{key}", "h", "/x/eth/", None),
        ("", "/x/{network}/{key}", "h", "/x/eth/k/", None),
        ("", "/x/{network}/{key}", "h", "/y/eth/k", None),
        ("", "/x/{network}/{key}", "h", "/x/nope/k", None),
        ("{network}.*", "/v2/{key}", "eth-sepolia.rpc.example.com", "/v2/k", UrlMeaning("ethereum/sepolia", "k")),
        ("{network}.*", "/v2/{key}", "eth-sepolia", "/v2/k", None),
        ("{network}.*", "/v2/{key}", "rpc.eth.example.com", "/v2/k", None),
        ("{any}.{network}.*", "/{key}", "my.eth.example.com", "/k", UrlMeaning("ethereum/mainnet", "k")),
        ("{network}.example.com", "/{key}", "eth.example.com", "/k", UrlMeaning("ethereum/mainnet", "k")),
        ("{network}.example.com", "/{key}", "eth.example.com.evil", "/k", None),
        ("{network}.*", "/", "eth.example.com", "/", UrlMeaning("ethereum/mainnet")),
        ("", "/o?network={network}&dkey={key}", "h", "/o?dkey=k&x=1&network=eth", UrlMeaning("ethereum/mainnet", "k", TAKEN)),
        ("", "/o?network={network}&dkey={key}", "h", "/o?network=eth", None),
        ("", "/o?network={network}&dkey={key}", "h", "/o?network=eth&dkey=", None),
        ("", "/o?network={network}&dkey={key}", "h", "/o?network=eth&dkey=k&dkey=l", None),
    ],
)  # fmt: skip
def test_pattern_reads_the_network_and_key_of_a_url(
    host: str, path: str, given_host: str, given: str, expected: UrlMeaning | None
) -> None:
    found = read(alias((host, path)), given_host, given)
    assert found == expected
    assert "'k'" not in repr(found)


def test_first_pattern_that_matches_counts() -> None:
    found = alias(("", "/{any}/evm/{network}?secret={key}"), ("", "/{any}/evm/{network}"))
    assert read(found, "h", "/main/evm/eth?secret=k") == UrlMeaning("ethereum/mainnet", "k", frozenset(("secret",)))
    assert read(found, "h", "/main/evm/eth?x=1") == UrlMeaning("ethereum/mainnet")


def test_more_literal_pattern_counts() -> None:
    one, other = alias(("", "/{network}/{key}")), alias(("", "/eth/{network}"), name="b")
    for aliases in ((one, other), (other, one)):
        found = UrlAliases(aliases).read(SplitUrl(["h"], ["eth", "eth-sepolia"]))
        assert found == UrlMeaning("ethereum/sepolia")


def test_page_without_a_key_is_left_to_the_service() -> None:
    found = alias(("{network}.*", "/{key}"), ("{network}.*", "/"))
    assert read(found, "eth.example.com", "/", "other") is None
    assert read(found, "eth.example.com", "/", "socket") is not None
    assert read(found, "eth.example.com", "/k", "other") == UrlMeaning("ethereum/mainnet", "k")


@pytest.mark.parametrize(
    ("host", "path", "words"),
    [
        ("", "/{key}", "must have {network} once"),
        ("", "/{network}/{network}", "must have {network} once"),
        ("", "/{network}/{key}/{key}", "must have {key} at most once"),
        ("{key}.*", "/{network}", "must not be in the host"),
        ("*.example.com", "/{network}", "must be at the end of the host"),
        ("", "/{network}/{chain}", "the placeholders are"),
        ("", "/{network}/v{any}", "the placeholders are"),
    ],
)
def test_wrong_pattern_is_reported(host: str, path: str, words: str) -> None:
    assert any(words in fault for fault in UrlPattern.of(path, host=host).faults())


def test_good_pattern_has_no_fault() -> None:
    assert [*UrlPattern.of("/{any}/evm/{network}?secret={key}", host="a.*").faults()] == []


@pytest.mark.parametrize(
    ("one", "other", "is_ambiguous"),
    [
        (("", "/a/{network}"), ("", "/a/{network}"), False),
        (("", "/a/{network}"), ("", "/b/{network}"), False),
        (("", "/{network}/{key}"), ("", "/{any}/{network}"), True),
        (("", "/{network}/{key}"), ("", "/eth/{network}"), False),
        (("", "/{network}/{key}"), ("", "/other/{network}"), False),
        (("", "/{network}/{key}"), ("", "/{network}/"), False),
        (("{network}.*", "/{key}"), ("{any}.{network}.*", "/{key}"), True),
        (("{network}.*", "/{key}"), ("", "/{network}"), True),
        (("{network}.a.com", "/{key}"), ("{network}.b.com", "/{key}"), False),
        (("{network}.com", "/{key}"), ("{network}.b.com", "/{key}"), False),
        (("{network}.*", "/v2/{key}"), ("{network}.*", "/v3/{key}"), False),
    ],
)
def test_patterns_that_disagree_about_a_url_are_ambiguous(
    one: tuple[str, str], other: tuple[str, str], is_ambiguous: bool
) -> None:
    found = [*clashes([alias(one), alias(other, name="b")])]
    assert bool(found) == is_ambiguous
    assert all("a.toml:0" in fault and "b.toml:0" in fault for fault in found)


def test_same_name_for_two_networks_is_ambiguous() -> None:
    other = alias(("", "/{network}/{key}"), networks={"eth": "ethereum/hoodi"}, name="b")
    assert [*clashes([alias(("", "/{network}/{key}")), other])]
    same = alias(("", "/{network}/{key}"), networks={"eth": "ethereum/mainnet", "x": "base/mainnet"}, name="b")
    assert not [*clashes([alias(("", "/{network}/{key}")), same])]
