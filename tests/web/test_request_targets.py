"""Keys are taken out of request targets."""

from __future__ import annotations

import pytest

from proxy.web.request_targets import RequestTarget, read_target

PATH = "/v1/rpc/ethereum/mainnet"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PATH, RequestTarget(PATH)),
        (f"{PATH}/", RequestTarget(PATH)),
        (f"{PATH}//", RequestTarget(f"{PATH}//")),
        ("/v1/chains/", RequestTarget("/v1/chains/")),
        (f"{PATH}/abc", RequestTarget(PATH, path_key="abc")),
        (f"{PATH}/abc/", RequestTarget(f"{PATH}/", path_key="abc")),
        (f"{PATH}/a%62c", RequestTarget(PATH, path_key="abc")),
        (f"{PATH}/abc?x=1", RequestTarget(PATH, "x=1", path_key="abc")),
        (f"{PATH}/abc/def", RequestTarget(f"{PATH}/abc/def")),
        ("/v1/ws/solana/devnet/abc", RequestTarget("/v1/ws/solana/devnet", path_key="abc")),
        ("/v1/bundler/base/sepolia/abc", RequestTarget("/v1/bundler/base/sepolia", path_key="abc")),
        ("/v1/paymaster/base/sepolia/abc", RequestTarget("/v1/paymaster/base/sepolia", path_key="abc")),
        ("/v1/tokens/ethereum/balances/abc", RequestTarget("/v1/tokens/ethereum/balances/abc")),
        ("/v1/webhooks?apiKey=abc", RequestTarget("/v1/webhooks", query_keys=("abc",))),
        ("/v1/webhooks?page=2&apiKey=a%62c&limit=1", RequestTarget("/v1/webhooks", "page=2&limit=1", query_keys=("abc",))),
        ("/v1/webhooks?%61piKey=abc", RequestTarget("/v1/webhooks", query_keys=("abc",))),
        ("/v1/webhooks?apiKey=a&apiKey=b", RequestTarget("/v1/webhooks", query_keys=("a", "b"))),
        ("/v1/webhooks?apiKey", RequestTarget("/v1/webhooks", query_keys=("",))),
        ("/v1/webhooks?apikey=a", RequestTarget("/v1/webhooks", "apikey=a")),
        ("/v1/webhooks?x=apiKey&&y=%2B", RequestTarget("/v1/webhooks", "x=apiKey&&y=%2B")),
        (f"{PATH}/abc?apiKey=def", RequestTarget(PATH, path_key="abc", query_keys=("def",))),
        ("*", RequestTarget("*")),
    ],
)  # fmt: skip
def test_target_is_split_into_native_target_and_keys(text: str, expected: RequestTarget) -> None:
    found = read_target(text)
    assert found == expected
    assert "abc" not in repr(read_target(f"{PATH}/abc"))
