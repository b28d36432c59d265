"""From where a key may be used."""

from __future__ import annotations

import pytest

from proxy.core.access import KeyRestrictions, block_of, origin_of, restrictions_of


def test_no_lists_are_no_restrictions() -> None:
    assert restrictions_of([], []) is None


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("10.1.2.3", "10.1.2.3/32"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        (" ::1 ", "::1/128"),
        ("2001:DB8::5/32", "2001:db8::/32"),
    ],
)
def test_block_has_one_form(text: str, block: str) -> None:
    assert block_of(text) == block


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "example.com", "10.0.0", "0x0a000001"])
def test_malformed_address_block_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no address or block"):
        block_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example.com",
        "ftp://example.com",
        "https://",
        "https://*",
        "https://a.*.com",
        "https://a.com/x",
        "https://a b",
    ],
)
def test_malformed_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        origin_of(text)


def test_each_list_that_is_not_empty_must_hold() -> None:
    restrictions = KeyRestrictions(("10.0.0.0/8", "::1/128"), ("https://app.example.com", "https://*.example.org"))
    good = "https://app.example.com"
    assert not restrictions.refusal("10.9.9.9", good)
    assert not restrictions.refusal("::ffff:10.9.9.9", good)
    assert not restrictions.refusal("::1", "https://deep.down.EXAMPLE.org")
    assert "address" in str(restrictions.refusal("11.0.0.1", good))
    assert "address" in str(restrictions.refusal("nonsense", good))
    for origin in (
        "",
        "null",
        "https://example.org",
        "http://app.example.com",
        "https://evil.com/.example.org",
        "https://*.example.org",
    ):
        assert "origin" in str(restrictions.refusal("10.0.0.1", origin)), origin


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("198.51.100.7", "from the address 198.51.100.7"),
        ("::ffff:198.51.100.7", "from the address 198.51.100.7"),
        ("2001:DB8::1", "from the address 2001:db8::1"),
        ("<script>", "the address of this request is not known"),
    ],
)
def test_refusal_names_the_address_it_was_decided_by(address: str, words: str) -> None:
    refusal = KeyRestrictions(("10.0.0.0/8",), ()).refusal(address, "")
    assert refusal is not None
    assert refusal.reason == "ip"
    assert f"{words}: change its allowed_ips" in refusal.message
    assert "10.0.0.0" not in refusal.message


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ("https://other.example.com", "from the origin https://other.example.com"),
        ("null", "from this origin"),
        ("", "this request has no Origin header"),
    ],
)
def test_refusal_names_the_origin(origin: str, words: str) -> None:
    refusal = KeyRestrictions((), ("https://app.example.com",)).refusal("10.0.0.1", origin)
    assert refusal is not None
    assert refusal.reason == "origin"
    assert f"{words}: change its allowed_origins" in refusal.message
    assert "app.example.com" not in refusal.message


def test_restrictions_are_equal_by_what_they_let_in() -> None:
    assert restrictions_of(["10.0.0.0/8"], []) == KeyRestrictions(("10.0.0.0/8",), ())
    assert KeyRestrictions(("10.0.0.0/8",), ()) != KeyRestrictions((), ())
