"""Whether the powers of one key are within those of another, or of a person."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from proxy.core.access import SCOPES, USUAL_SCOPES, scope_bits
from proxy.core.key_powers import SCOPE_PERMISSIONS, KeyPowers, excess, of_role

NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
LATER = NOW + datetime.timedelta(days=1)


def test_powers_are_within_themselves() -> None:
    narrow = KeyPowers(
        live=False,
        scopes=1,
        requests_per_second=5,
        expires_at=NOW,
        ips=["10.0.0.0/8"],
        origins=["https://*.example.com"],
        networks=["ethereum/sepolia"],
        methods=["eth_call"],
        contracts=["0x" + "ab" * 20],
        directives=["retry"],
    )
    for powers in (KeyPowers(), narrow):
        assert excess(powers, powers) == ""
    assert excess(KeyPowers(), narrow) == ""
    assert excess(narrow, KeyPowers()) == "mode"


@pytest.mark.parametrize(
    ("has", "wants", "field"),
    [
        ({"live": False}, {}, "mode"),
        ({"scopes": 0b01}, {"scopes": 0b11}, "scopes"),
        ({"sends_publicly": False}, {}, "private_transactions"),
        ({"networks": ["a/b"]}, {}, "allowed_networks"),
        ({"networks": ["a/b"]}, {"networks": ["a/b", "a/c"]}, "allowed_networks"),
        ({"methods": ["eth_call"]}, {}, "allowed_methods"),
        ({"contracts": ["0xaa"]}, {"contracts": ["0xbb"]}, "allowed_contracts"),
        ({"ips": ["10.0.0.0/8"]}, {}, "allowed_ips"),
        ({"ips": ["10.0.0.0/8"]}, {"ips": ["10.0.0.0/7"]}, "allowed_ips"),
        ({"ips": ["10.0.0.0/8"]}, {"ips": ["::/0"]}, "allowed_ips"),
        ({"ips": ["10.0.0.0/8"]}, {"ips": ["10.1.0.0/16"]}, ""),
        ({"ips": ["10.0.0.0/8", "2001:db8::/32"]}, {"ips": ["2001:db8:1::/48", "10.0.0.1/32"]}, ""),
        ({"origins": ["https://a.example.com"]}, {}, "allowed_origins"),
        ({"origins": ["https://a.example.com"]}, {"origins": ["https://*.example.com"]}, "allowed_origins"),
        ({"origins": ["https://*.example.com"]}, {"origins": ["http://a.example.com"]}, "allowed_origins"),
        ({"origins": ["https://*.example.com"]}, {"origins": ["https://a.example.com", "https://*.b.example.com"]}, ""),
        ({"requests_per_second": 5}, {}, "requests_per_second"),
        ({"requests_per_second": 5}, {"requests_per_second": 6}, "requests_per_second"),
        ({"units_per_second": 5}, {"units_per_second": 5}, ""),
        ({"expires_at": NOW}, {}, "expires_at"),
        ({"expires_at": NOW}, {"expires_at": LATER}, "expires_at"),
        ({"expires_at": LATER}, {"expires_at": NOW}, ""),
        ({"directives": ["retry"]}, {"directives": ["retry", "verify"]}, "directives"),
    ],
)
def test_first_field_beyond_the_holder_is_named(has: dict[str, Any], wants: dict[str, Any], field: str) -> None:
    assert excess(KeyPowers(**has), KeyPowers(**wants)) == field


def test_roles_have_the_scopes_of_their_permissions() -> None:
    assert set(SCOPE_PERMISSIONS) == set(SCOPES) - set(USUAL_SCOPES)
    assert of_role("owner").scopes == scope_bits(SCOPES)
    assert of_role("developer").scopes == scope_bits([*USUAL_SCOPES, "usage:read", "activity:read", "keys:manage"])
    assert of_role("read-only").scopes == scope_bits(["requests:read", "usage:read", "activity:read"])
    assert excess(of_role("developer"), of_role("owner")) == "scopes"
