"""Addresses that user-supplied URLs must not reach."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.egress import EgressPolicy, is_public

NEVER = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "100.127.255.255"),
    *("127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255"),
    *("192.0.0.1", "192.0.0.8", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255"),
    *("198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "2001::1", "2001:10::1", "2001:20::1", "2001:db8::1"),
    *("2002:7f00:1::", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1"),
]  # fmt: skip
PUBLIC = [
    *(
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
    ),
    *("172.15.255.255", "172.32.0.0", "191.255.255.255", "192.0.1.0", "193.0.0.0", "198.17.255.255", "223.255.255.255"),
    *("2001:200::1", "2001:4860:4860::8888", "2606:4700:4700::1111", "2a00:1450::1", "3ffe::1"),
]


@pytest.mark.parametrize("text", NEVER)
def test_special_address_is_never_public(text: str) -> None:
    assert not is_public(ip_address(text))
    assert not EgressPolicy().may(text)


@pytest.mark.parametrize("text", PUBLIC)
def test_address_of_the_internet_is_public(text: str) -> None:
    assert EgressPolicy().may(text)


@pytest.mark.parametrize(
    "text", ["", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "fe80::1%eth0", "8.8.8.8 "]
)
def test_unusual_spelling_of_an_address_may_not_be_reached(text: str) -> None:
    assert not EgressPolicy(allow=["0.0.0.0/0"]).may(text)


def test_operator_allows_a_block_and_no_more() -> None:
    reach = EgressPolicy(allow=["127.0.0.0/8", "fd00::/8"])
    assert reach.may("127.0.0.1")
    assert reach.may("fd00::1")
    assert not reach.may("10.0.0.1")
    assert not reach.may("::ffff:127.0.0.1")


def test_operators_denial_goes_before_everything() -> None:
    reach = EgressPolicy(allow=["10.0.0.0/8"], deny=["10.1.0.0/16", "1.1.1.0/24", "2606:4700::/32"])
    assert reach.may("10.2.0.1")
    for text in ("10.1.0.1", "1.1.1.1", "2606:4700::1"):
        assert not reach.may(text)


@settings(deadline=None)
@given(st.ip_addresses(v=4))
def test_no_ipv4_address_is_public_that_python_calls_special(address: IPv4Address) -> None:
    """Stricter than the library, never looser: but for two blocks of anycast services that are reachable by all."""
    if not address.is_global and not address.is_private:
        assert not is_public(address)
    if address.is_private or address.is_multicast or address.is_reserved or address.is_loopback:
        assert not is_public(address)


@settings(deadline=None)
@given(st.ip_addresses(v=4))
def test_ipv4_inside_ipv6_is_never_public(inner: IPv4Address) -> None:
    number = int(inner)
    forms = [
        IPv6Address(number),
        IPv6Address(0xFFFF << 32 | number),
        IPv6Address(0x64FF9B << 96 | number),
        IPv6Address(0x2002 << 112 | number << 80),
    ]
    assert not [form for form in forms if is_public(form)]
