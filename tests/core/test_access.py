"""Keys: their form, their checksum, their digest, their scopes."""

from __future__ import annotations

import hashlib
import hmac
import string
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import access
from proxy.core.access import ALL_SCOPES, SCOPE_BIT, SCOPES, USUAL_SCOPES, Account
from proxy.core.limits import BucketRates
from tests.keys import key_of

# A reproducible key: its entropy is the bytes 0 to 31. Keys in use must stay valid, so it never changes.
EXAMPLE = "svc_live_CTQj2uNU3MFagCXG9LRKRcwGkBIDlf3Zc7Vx"
ENTROPY = bytes(range(32))
PEPPER = b"p" * 32
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase


def test_published_example_is_minted_again_from_its_entropy() -> None:
    assert access.mint("live", ENTROPY) == EXAMPLE
    assert access.is_well_formed(EXAMPLE)


def test_checksum_is_the_crc32_of_all_before_it_in_base62() -> None:
    number = 0
    for character in EXAMPLE[-6:]:
        number = number * 62 + BASE62.index(character)
    assert number == crc32(EXAMPLE[:-6].encode())


@given(st.binary(min_size=32, max_size=32), st.sampled_from(access.MODES))
def test_every_minted_key_is_well_formed_and_shows_its_mode(entropy: bytes, mode: access.Mode) -> None:
    key = access.mint(mode, entropy)
    assert len(key) == 45
    assert access.is_well_formed(key)
    assert key.startswith(f"svc_{mode}_")


@pytest.mark.parametrize("entropy", [b"", b"\0" * 32, b"\xff" * 32])
def test_extreme_entropy_gives_a_key_of_full_length(entropy: bytes) -> None:
    assert access.is_well_formed(access.mint("test", entropy))


def test_every_single_character_typo_is_refused() -> None:
    for index, right in enumerate(EXAMPLE):
        for wrong in BASE62 + "_-. é":
            if wrong != right:
                assert not access.is_well_formed(EXAMPLE[:index] + wrong + EXAMPLE[index + 1 :])


def test_every_swap_of_neighbours_is_refused() -> None:
    for index in range(len(EXAMPLE) - 1):
        left, right = EXAMPLE[index], EXAMPLE[index + 1]
        if left != right:
            assert not access.is_well_formed(EXAMPLE[:index] + right + left + EXAMPLE[index + 2 :])


def test_every_lost_or_doubled_character_is_refused() -> None:
    for index in range(len(EXAMPLE)):
        assert not access.is_well_formed(EXAMPLE[:index] + EXAMPLE[index + 1 :])
        assert not access.is_well_formed(EXAMPLE[:index] + EXAMPLE[index] + EXAMPLE[index:])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "svc_live_",
        "svc_live_" + "0" * 36,
        EXAMPLE.replace("live", "test"),
        EXAMPLE.upper(),
        EXAMPLE + "\n",
        " " + EXAMPLE,
        EXAMPLE * 2,
        "svc_live_" + "٠" * 36,  # digits, but not ASCII ones
        "svc_live_" + "\0" * 36,
        "\ud800",
        "x" * 100_000,
    ],
)  # fmt: skip
def test_malformed_key_is_refused(text: str) -> None:
    assert not access.is_well_formed(text)


@given(st.binary(max_size=60))
def test_any_header_is_judged_without_an_error(raw: bytes) -> None:
    assert not access.is_well_formed(raw.decode("latin-1"))
    assert not access.is_well_formed(raw.decode("utf-8", "surrogateescape"))


def test_digest_is_keyed_and_never_the_key() -> None:
    found = access.digest(PEPPER, EXAMPLE)
    assert found == hmac.new(PEPPER, EXAMPLE.encode(), hashlib.sha256).digest()
    assert found != access.digest(b"q" * 32, EXAMPLE)


def test_hint_shows_prefix_and_four_characters_only() -> None:
    assert access.hint_of(EXAMPLE) == f"svc_live_…{EXAMPLE[-4:]}"


def test_scopes_are_those_of_the_contract() -> None:
    assert (
        *("rpc:read", "rpc:write", "data:read", "wallets:manage"),
        *("webhooks:manage", "gas:manage", "bundler:send"),
        # Beyond the specification.
        "requests:read",
    ) == USUAL_SCOPES
    assert len(set(SCOPE_BIT.values())) == len(SCOPES)


def test_no_scopes_mean_the_usual_ones_and_one_means_one() -> None:
    assert access.scope_names(access.scope_bits([])) == list(USUAL_SCOPES)
    assert access.scope_names(ALL_SCOPES) == list(SCOPES)
    for name in SCOPES:
        assert access.scope_names(access.scope_bits([name])) == [name]


@given(st.sets(st.sampled_from(SCOPES), min_size=1))
def test_scopes_survive_the_way_through_bits(names: set[str]) -> None:
    assert set(access.scope_names(access.scope_bits([*names]))) == names


def test_unknown_scope_is_an_error_and_not_all_scopes() -> None:
    with pytest.raises(KeyError):
        access.scope_bits(["rpc:reed"])


@pytest.mark.parametrize(
    ("has", "asked", "may"),
    [
        (("rpc:read",), ("rpc:read",), True),
        (("rpc:read",), ("rpc:write",), False),
        (("rpc:read",), ("rpc:read", "rpc:write"), True),
        (("data:read", "gas:manage"), ("rpc:read", "rpc:write"), False),
        ((), ("bundler:send",), True),
    ],
)
def test_key_may_do_anything_that_one_of_its_scopes_allows(
    has: tuple[str, ...], asked: tuple[str, ...], may: bool
) -> None:
    assert key_of(scopes=access.scope_bits(has)).may(access.scope_bits(asked)) is may


def test_no_representation_shows_a_digest() -> None:
    key = key_of(digest=b"\xaa\xbb")
    assert repr(key) == "<Key key_1 live 10/s alive>"
    assert repr(key_of(disabled=True, live=False)) == "<Key key_1 test 10/s disabled>"
    key.alive = False
    assert repr(key) == "<Key key_1 live 10/s replaced>"
    assert repr(key.account) == "<Account acct_1 free 100/day, 0 leased>"
    assert repr(Account(id="a", plan="x", day_limit=0, exhausted=True)) == "<Account a x unlimited/day, exhausted>"


def test_cost_of_one_is_the_inverse_of_the_rate() -> None:
    rate = BucketRates(0, 10, 200)
    assert (rate.request_s, rate.unit_s) == (0.1, 0.005)


@pytest.mark.parametrize(
    ("address", "prefix"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("no:address", "no:address"),
        ("", ""),
    ],
)
def test_clients_of_one_ipv6_network_are_counted_together(address: str, prefix: str) -> None:
    assert access.client_prefix_of(address) == prefix
