"""The key that a request presents."""

from __future__ import annotations

import base64

import pytest

from proxy.core.access import mint
from proxy.core.presented_key import PresentedKey, presented_key

KEY, OTHER = mint("live", bytes(32)), mint("live", b"\1" * 32)
HEADER, URL, TWO = PresentedKey(KEY), PresentedKey(KEY, is_in_url=True), PresentedKey("")


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("named", "authorization", "in_url", "expected"),
    [
        ([], [], [], None),
        ([""], ["", "Basic", "Bearer ", "Digest x", KEY], [""], None),
        ([KEY], [], [], HEADER),
        ([f" {KEY} "], [], [], HEADER),
        ([], [f"bEaReR  {KEY} "], [], HEADER),
        ([], [basic(f"anyone:{KEY}")], [], HEADER),
        ([], [basic(f":{KEY}")], [], HEADER),
        ([], [basic(f"{KEY}:")], [], HEADER),
        ([], [basic(KEY)], [], HEADER),
        ([], ["Basic !", "basic /w==", f"Basic {KEY}"], [], None),
        ([], [], [KEY], URL),
        ([], [], [KEY, KEY, ""], URL),
        ([KEY], [], [KEY], HEADER),
        ([], [f"Bearer {KEY}"], [KEY], HEADER),
        ([], [basic(f"x:{KEY}")], [KEY], HEADER),
        ([KEY], [f"Bearer {KEY}", basic(f"x:{KEY}")], [KEY], HEADER),
        ([KEY, OTHER], [], [], TWO),
        ([KEY], [f"Bearer {OTHER}"], [], TWO),
        ([KEY], [basic(f"x:{OTHER}")], [], TWO),
        ([KEY], [], [OTHER], TWO),
        ([], [f"Bearer {KEY}", f"Bearer {OTHER}"], [], TWO),
        ([KEY], [], ["x"], TWO),
    ],
)
def test_request_presents_one_key(
    named: list[str], authorization: list[str], in_url: list[str], expected: PresentedKey | None
) -> None:
    found = presented_key(named, authorization, in_url)
    assert (found and found.text) == (expected and expected.text)
    if found is not None and expected is not None and expected is not TWO:
        assert found.is_in_url == expected.is_in_url
    assert KEY not in repr(found)


@pytest.mark.parametrize("foreign", [basic("proxy:password"), "Bearer token-of-a-proxy"])
def test_authorization_for_a_proxy_is_ignored_beside_a_key(foreign: str) -> None:
    assert presented_key([KEY], [foreign]) == HEADER
    assert presented_key([], [foreign], [KEY]) == URL
    alone = presented_key([], [foreign])
    assert alone is not None
    assert alone.text not in ("", KEY)
