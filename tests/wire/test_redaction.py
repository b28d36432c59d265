"""Which words of an upstream's settings no client may see."""

from __future__ import annotations

import pytest

from proxy.wire.redaction import private_words


@pytest.mark.parametrize(
    ("url", "headers", "expected"),
    [
        ("http://geth:8545", {}, {"geth:8545", "//geth"}),
        ("https://Node.Example/rpc", {}, {"node.example", "node.example:443", "//node.example"}),
        ("wss://a.example/v2/0123456789abcdefX", {}, {"0123456789abcdefx"}),
        ("https://a.example/ext/bc/C/rpc?apikey=abc123&net=mainnet", {}, {"abc123"}),
        ("https://us%21er:pass%40word@a.example", {}, {"us%21er", "us!er", "pass%40word", "pass@word", "us!er:pass@word"}),
        ("http://geth:1", {"Authorization": "Bearer abcdef123456"}, {"abcdef123456", "bearer abcdef123456"}),
    ],
)  # fmt: skip
def test_address_and_credentials_are_private(url: str, headers: dict[str, str], expected: set[str]) -> None:
    assert expected <= set(private_words(url, headers))


def test_common_words_are_not_private() -> None:
    words = private_words("http://geth:8545/v2/mainnet/rpc?chain=eth", {"Accept": "text"})
    assert set(words) == {"geth:8545", "//geth"}
