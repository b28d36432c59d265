"""Aliases: every shipped file, the URLs that its service documents, and faults with their file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.data_files import CONFIG
from proxy.errors import StartError
from proxy.settings import load_aliases, load_with_tables
from proxy.web.request_targets import MOST_PARAMETERS, MOST_SEGMENTS, RequestTarget, TargetReader
from tests.shipped_tables import TABLES

SHIPPED = sorted(path.stem for path in (CONFIG / "aliases").glob("*.toml"))
KEY = "svc_live_1"
MAINNET, SEPOLIA = "ethereum/mainnet", "ethereum/sepolia"
CALLS = [
    ("alchemy", "eth-mainnet.rpc.example.com", "/v2/{key}", MAINNET),
    ("alchemy", "ETH-Sepolia.rpc.example.com:8545", "/v2/{key}", SEPOLIA),
    ("alchemy", "base-mainnet.example.com", "/v2/{key}", "base/mainnet"),
    ("alchemy", "rpc.example.com", "/alchemy/polygon-amoy/v2/{key}", "polygon/amoy"),
    ("ankr", "rpc.example.com", "/eth/{key}", MAINNET),
    ("ankr", "rpc.example.com", "/ankr/eth_sepolia/{key}", SEPOLIA),
    ("ankr", "rpc.example.com", "/multichain/{key}", MAINNET),
    ("drpc", "rpc.example.com", "/ogrpc?network=ethereum&dkey={key}", MAINNET),
    ("drpc", "rpc.example.com", "/ogrpc?dkey={key}&network=sepolia", SEPOLIA),
    ("erpc", "rpc.example.com", "/main/evm/1?secret={key}", MAINNET),
    ("erpc", "rpc.example.com", "/main/evm/11155111", SEPOLIA),
    ("infura", "mainnet.rpc.example.com", "/v3/{key}", MAINNET),
    ("infura", "rpc.example.com", "/infura/base-mainnet/v3/{key}", "base/mainnet"),
    ("nodecore", "rpc.example.com", "/queries/ethereum/api-key/{key}", MAINNET),
    ("nodecore", "rpc.example.com", "/queries/8453", "base/mainnet"),
    ("proxyd", "optimism.rpc.example.com", "/{key}", "optimism/mainnet"),
    ("proxyd", "base-sepolia.rpc.example.com", "/", "base/sepolia"),
    ("quicknode", "my-node.base-mainnet.rpc.example.com", "/{key}/", "base/mainnet"),
    ("quicknode", "rpc.example.com", "/quicknode/ethereum-mainnet/{key}", MAINNET),
]
SOCKETS = [
    ("alchemy", "eth-mainnet.rpc.example.com", "/v2/{key}", MAINNET),
    ("ankr", "rpc.example.com", "/eth/ws/{key}", MAINNET),
    ("drpc", "rpc.example.com", "/ogws?network=ethereum&dkey={key}", MAINNET),
    ("infura", "mainnet.rpc.example.com", "/ws/v3/{key}", MAINNET),
    ("quicknode", "my-node.base-mainnet.rpc.example.com", "/{key}/", "base/mainnet"),
]

# Reads, with the native path of REST.
READS = [
    ("alchemy", "eth-mainnet.rpc.example.com", "/nft/v3/{key}/getNFTsForOwner?owner=0x1",
     "/v1/alchemy/ethereum-mainnet/getNFTsForOwner", "owner=0x1"),
    ("alchemy", "rpc.example.com", "/alchemy/eth-sepolia/nft/v3/{key}/getNFTMetadata",
     "/v1/alchemy/ethereum-sepolia/getNFTMetadata", ""),
    ("alchemy", "rpc.example.com", "/alchemy/base-mainnet/v2/{key}/getContractMetadata",
     "/v1/alchemy/base-mainnet/getContractMetadata", ""),
    ("alchemy", "rpc.example.com", "/alchemy/dev/v2/{key}/x?a[]=1&b=2&a%5B%5D=3&b=4", "/v1/alchemy/dev-mainnet/x",
     "b=2&b=4&a=1,3"),
    ("infura", "gas.rpc.example.com", "/v3/{key}/networks/1/suggestedGasFees",
     "/v1/infura/ethereum-mainnet/suggestedGasFees", ""),
    ("infura", "gas.rpc.example.com", "/networks/8453/suggestedGasFees", "/v1/infura/base-mainnet/suggestedGasFees", ""),
]  # fmt: skip


def reader_of(*names: str, own: str = "") -> TargetReader:
    return TargetReader(load_aliases(dict.fromkeys(names, True), TABLES, own=own), {"v1", "docs"})


@pytest.mark.parametrize(("name", "host", "target", "network"), CALLS)
def test_call_to_the_url_of_another_service_has_a_native_target(
    name: str, host: str, target: str, network: str
) -> None:
    key = KEY if "{key}" in target else ""
    found = reader_of(name).read(target.format(key=KEY), host, "call")
    assert found == RequestTarget(f"/v1/rpc/{network}", path_key=key)


@pytest.mark.parametrize(
    "more", ["&a" * MOST_PARAMETERS, "&%61=%61" * MOST_PARAMETERS, "/" * (MOST_SEGMENTS + 1), "/a" * 4000]
)
def test_url_with_too_many_parts_is_not_taken_apart(more: str) -> None:
    target = f"/main/evm/1{more}" if more.startswith("/") else f"/main/evm/1?secret={KEY}{more}"
    assert reader_of("erpc", "drpc").read(target, "rpc.example.com", "call").path.startswith("/main/evm/1")


@pytest.mark.parametrize(("name", "host", "target", "network"), SOCKETS)
def test_handshake_at_the_url_of_another_service_has_a_native_target(
    name: str, host: str, target: str, network: str
) -> None:
    found = reader_of(name).read(target.format(key=KEY), host, "socket")
    assert found == RequestTarget(f"/v1/ws/{network}", path_key=KEY)


@pytest.mark.parametrize(("name", "host", "target", "path", "query"), READS)
def test_read_at_the_url_of_another_service_has_a_native_target(
    name: str, host: str, target: str, path: str, query: str
) -> None:
    key = KEY if "{key}" in target else ""
    expected = RequestTarget(path, query, path_key=key)
    together = reader_of(*(each for each in SHIPPED if each != "proxyd"))
    for kind in ("other", "call"):
        assert reader_of(name).read(target.format(key=KEY), host, kind) == expected
    assert together.read(target.format(key=KEY), host, "other") == expected
    assert reader_of(name).read(target.format(key=KEY), host, "socket").path != path


@pytest.mark.parametrize("word", ["get-it", "a.b", "..", "%2e%2e", "a%2Fb", "x" * 65])
def test_read_has_a_plain_name(word: str) -> None:
    target = f"/alchemy/eth-mainnet/v2/{KEY}/{word}"
    assert reader_of("alchemy").read(target, "rpc.example.com", "other").path.startswith("/alchemy/")


def test_every_shipped_alias_is_tested_and_a_setting() -> None:
    assert {case[0] for case in CALLS} == set(SHIPPED)
    settings, _ = load_with_tables(None, environ={"DATABASE_URL": "postgresql://x", "PENSTOCK_KEYS__PEPPER": "p" * 32})
    assert settings.aliases == dict.fromkeys(SHIPPED, False)


def test_all_aliases_but_one_can_be_on_together() -> None:
    """QuickNode and proxyd both have keys as whole paths."""
    together = [name for name in SHIPPED if name != "proxyd"]
    reader = reader_of(*together)
    for name, host, target, network in CALLS:
        if name in together:
            assert reader.read(target.format(key=KEY), host, "call").path == f"/v1/rpc/{network}"


def test_own_paths_are_no_aliases() -> None:
    reader = reader_of(*(name for name in SHIPPED if name != "quicknode"))
    for target in ("/v1/rpc/ethereum/mainnet", "/docs/evm/1", "/nope", "/x/y/z"):
        assert reader.read(target, "rpc.example.com", "call") == RequestTarget(target)


def test_rest_of_the_query_is_kept() -> None:
    found = reader_of("drpc").read(f"/ogrpc?a=b%20c&dkey={KEY}&network=ethereum&apiKey=x", "", "call")
    assert found == RequestTarget(f"/v1/rpc/{MAINNET}", "a=b%20c", KEY, ("x",))


def faults_of(*names: str, own: Path | None = None) -> list[str]:
    with pytest.raises(StartError) as caught:
        load_aliases(dict.fromkeys(names, True), TABLES, own=str(own or ""))
    return list(caught.value.faults)


def own_alias(tmp_path: Path, text: str, name: str = "mine") -> Path:
    (tmp_path / "aliases").mkdir(exist_ok=True)
    (tmp_path / "aliases" / f"{name}.toml").write_text(text)
    return tmp_path


def test_ambiguous_aliases_are_reported_with_files_and_lines() -> None:
    faults = faults_of("proxyd", "quicknode")
    assert faults
    assert all("proxyd.toml line 8: is ambiguous, quicknode.toml line " in fault for fault in faults)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'title = "X"\n[[patterns]]\npath = "/{key}"\n',
            "mine.toml: patterns.0.path: must have {network} once (line 3)",
        ),
        (
            'title = "X"\n[[patterns]]\nhost = "{key}.*"\npath = "/{network}"\n',
            "mine.toml: patterns.0.path: {key} must not",
        ),
        (
            'title = "X"\n[[patterns]]\npath = "/v1/{network}"\n',
            "mine.toml: patterns.0.path: must not start with /v1",
        ),
        ('title = "X"\n[[patterns]]\npath = "x"\n', "mine.toml: patterns.0.path:"),
        ('title = "X"\n[[patterns]]\npath = "/{network}"\nto = "/v2"\n', "mine.toml: patterns.0.to:"),
        (
            'title = "X"\n[[patterns]]\npath = "/{network}"\nto = "/v1/{network}/{name}"\n',
            "mine.toml: patterns.0.path: {name} must be once in the path and once in `to`",
        ),
        (
            'title = "X"\n[[patterns]]\npath = "/{network}"\n[networks]\na = "atlantis/mainnet"\n',
            "mine.toml: networks.a: there is no network atlantis/mainnet (line 5)",
        ),
        ('title = "X"\nprovider = "alchmy"\n[[patterns]]\npath = "/{network}"\n', "mine.toml: provider: there is no"),
        ("title = \n", "mine.toml: not valid TOML"),
    ],
)
def test_wrong_file_is_reported_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    (fault,) = faults_of("mine", own=own_alias(tmp_path, text))
    assert words in fault


def test_operator_adds_an_alias(tmp_path: Path) -> None:
    text = 'title = "Old gateway"\n[[patterns]]\npath = "/old/{network}/{key}"\n[networks]\nmain = "ethereum/mainnet"\n'
    reader = reader_of("mine", own=str(own_alias(tmp_path, text)))
    assert reader.read(f"/old/main/{KEY}", "", "call") == RequestTarget("/v1/rpc/ethereum/mainnet", path_key=KEY)


def test_unknown_alias_is_reported_with_the_line_of_the_settings_file(tmp_path: Path) -> None:
    (config := tmp_path / "penstock.toml").write_text(
        "[log]\naccess = true\n[aliases]\nalchemy = true\nalchmy = true\n"
    )
    with pytest.raises(StartError) as caught:
        load_with_tables(config, environ={"DATABASE_URL": "postgresql://x", "PENSTOCK_KEYS__PEPPER": "p" * 32})
    (fault,) = caught.value.faults
    assert fault == "penstock.toml: aliases.alchmy: there is no alias alchmy; did you mean alchemy? (line 5)"
