"""The operator of an upstream that has no `operator` in the settings. Too few operators is safe, too many is not."""

from __future__ import annotations

import pytest

from proxy.core.node_operators import LOCAL
from proxy.settings import UpstreamSettings


def operator_of(url: str, **given: str) -> str:
    return UpstreamSettings(network="ethereum/mainnet", url=url, **given).operated_by  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "operator"),
    [
        ("https://mainnet.infura.io/v3/secret", "infura.io"),
        ("https://user:password@MAINNET.Infura.io:443/", "infura.io"),
        ("https://infura.io./", "infura.io"),
        ("wss://one.two.quiknode.pro/abc", "quiknode.pro"),
        ("https://node.example.co.uk", "example.co.uk"),
        ("https://example.co.uk", "example.co.uk"),
        ("https://8.8.8.8:8545", "8.8.8.8"),
        ("https://[2606:4700::1111]:8545/", "2606:4700::1111"),
        ("https://[::ffff:8.8.8.8]/", "8.8.8.8"),
        *[
            (f"http://{host}:8545/path", LOCAL)
            for host in (
                *("127.0.0.1", "127.8.8.8", "[::1]", "localhost", "10.0.0.5", "192.168.1.1", "[fd00::1]", "100.64.0.1"),
                *("[::ffff:10.0.0.5]", "geth", "geth-0.geth.chain.svc.cluster.local", "node.internal", "node.lan"),
                *("2130706433", "0x7f000001", "127.1", "my.localhost"),
            )
        ],
    ],
)
def test_operator_is_the_domain_of_the_url(url: str, operator: str) -> None:
    assert operator_of(url) == operator


def test_upstream_behind_a_unix_socket_is_local() -> None:
    assert operator_of("https://mainnet.infura.io/", socket="/run/geth.sock") == LOCAL


def test_name_in_the_settings_is_the_operator() -> None:
    assert operator_of("http://127.0.0.1:8545", operator="own") == "own"


def test_malformed_url_is_local() -> None:
    assert operator_of("https://[half") == LOCAL
