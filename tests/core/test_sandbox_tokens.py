"""Sandbox tokens are bound to a session, a key and a time."""

from __future__ import annotations

import pytest

from proxy.core.sandbox_tokens import key_of, token_for

PEPPER, SESSION, NOW = b"pepper", "s" * 43, 1_000_000


def test_token_names_its_key_for_its_session() -> None:
    token = token_for(PEPPER, SESSION, "key_1", NOW + 10)
    assert key_of(PEPPER, SESSION, token, NOW) == "key_1"


@pytest.mark.parametrize(
    ("pepper", "session", "now"),
    [(b"other", SESSION, NOW), (PEPPER, "t" * 43, NOW), (PEPPER, "", NOW), (PEPPER, SESSION, NOW + 10)],
)
def test_token_is_worth_nothing_elsewhere(pepper: bytes, session: str, now: int) -> None:
    assert key_of(pepper, session, token_for(PEPPER, SESSION, "key_1", NOW + 10), now) == ""


@pytest.mark.parametrize("change", [("key_1", "key_2"), (str(NOW + 10), str(NOW + 11)), (".", ""), ("sbx_", "sbx_x")])
def test_changed_token_is_refused(change: tuple[str, str]) -> None:
    token = token_for(PEPPER, SESSION, "key_1", NOW + 10)
    assert key_of(PEPPER, SESSION, token.replace(*change), NOW) == ""


@pytest.mark.parametrize("text", ["sbx_", "sbx_a.b", "sbx_a.1.ü", "sbx_a.٣.x", "sbx_a." + "9" * 400 + ".x"])
def test_other_text_is_refused(text: str) -> None:
    assert key_of(PEPPER, SESSION, text, NOW) == ""
