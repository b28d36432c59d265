"""Tokens, the token against forged requests, and passwords."""

from __future__ import annotations

import pytest

from proxy.core import sessions


def test_token_of_32_bytes_has_a_form_of_its_own() -> None:
    token = sessions.token_of(bytes(range(32)))
    assert len(token) == 43
    assert sessions.is_token(token)
    assert sessions.is_token(sessions.ADMIN_PREFIX + token)


@pytest.mark.parametrize(
    "text", ["", "x", "A" * 42, "A" * 44, "A" * 42 + "\n", "A" * 42 + "=", "Ä" * 43, "A" * 43 + "\n"]
)
def test_malformed_token_is_none(text: str) -> None:
    assert not sessions.is_token(text)


def test_csrf_token_belongs_to_one_session() -> None:
    one, other = "A" * 43, "B" * 43
    assert sessions.csrf_of(one) != one
    assert sessions.is_csrf(one, sessions.csrf_of(one))
    for wrong in ("", one, sessions.csrf_of(other), sessions.csrf_of(one)[:-1], "ü\ud800"):
        assert not sessions.is_csrf(one, wrong)


@pytest.mark.parametrize(
    ("fetch_site", "origin", "foreign"),
    [
        ("", "", False),
        ("same-origin", "https://elsewhere.example", False),
        ("none", "", False),
        ("same-site", "", True),
        ("cross-site", "", True),
        ("", "https://desk.example", False),
        ("", "https://DESK.example", False),
        ("", "https://desk.example:444", True),
        ("", "https://desk.example.evil.example", True),
        ("", "null", True),
        ("", "NULL", True),
        ("", "https://", True),
        ("", "desk.example", True),
        ("", "file://", True),
        ("", "ftp://desk.example", True),
        ("", "https://127.0.0.1:8545", False),
    ],
)
def test_page_of_another_origin_is_known_by_what_the_browser_says(fetch_site: str, origin: str, foreign: bool) -> None:
    found = sessions.is_foreign(fetch_site=fetch_site, origin=origin, hosts=("desk.example", "127.0.0.1:8545", ""))
    assert found is foreign


def test_page_over_http_is_foreign_to_a_service_over_https() -> None:
    for secure in (False, True):
        found = sessions.is_foreign(fetch_site="", origin="http://desk.example", hosts=("desk.example",), secure=secure)
        assert found is secure


@pytest.mark.parametrize(
    ("password", "wrong"),
    [
        ("a" * 11, True),
        ("aaaaaaaaaaaaaaa", True),
        ("holder.of.it@example.com", True),
        ("correct horse", False),
        ("x" * 201, True),
    ],
)
def test_password_is_long_and_not_the_email(password: str, wrong: bool) -> None:
    assert bool(sessions.password_fault(password, email="holder.of.it@example.com")) is wrong
