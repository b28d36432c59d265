"""Upstreams of a provider in one line: the networks, the URLs and what is never shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import orjson
import pytest

from proxy import settings
from proxy.commands.provider_networks import names_by_id
from proxy.errors import StartError
from proxy.settings.toml_files import line_of
from tests.service import command_here
from tests.shipped_tables import TABLES

KEY = "Top5ecretKey_9f"
REQUIRED = '[database]\nurl = "postgresql://h/d"\n[keys]\npepper = "--------------------------------"\n'
PROVIDERS = settings.load_providers()


def loaded(tmp_path: Path, blocks: str) -> settings.Settings:
    file = tmp_path / "penstock.toml"
    file.write_text(REQUIRED + blocks)
    return settings.load_with_tables(file, environ={})[0]


def faults(tmp_path: Path, blocks: str) -> tuple[str, ...]:
    with pytest.raises(StartError) as caught:
        loaded(tmp_path, blocks)
    return caught.value.faults


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_network_of_a_provider_is_known(name: str) -> None:
    networks = PROVIDERS[name].networks
    known = TABLES.with_networks(networks).chains
    assert [each for each in networks if known.find(*each.split("/")) is None] == []
    assert len({PROVIDERS[name].shown(each) for each in networks}) == len(networks)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"alchemy://{KEY}", f"https://base-sepolia.g.alchemy.com/v2/{KEY}"),
        (f"infura://{KEY}", f"https://base-sepolia.infura.io/v3/{KEY}"),
        (f"drpc://{KEY}", f"https://lb.drpc.org/ogrpc?network=base-sepolia&dkey={KEY}"),
        (f"quicknode://calm-forest/{KEY}", f"https://calm-forest.base-sepolia.quiknode.pro/{KEY}"),
        (f"chainstack://{KEY}", f"https://base-sepolia.core.chainstack.com/{KEY}"),
    ],
)
def test_key_becomes_the_url_of_the_network(tmp_path: Path, url: str, expected: str) -> None:
    found = loaded(tmp_path, f'[[upstreams]]\nnetwork = "base/sepolia"\nurl = "{url}"\nweight = 2.0\n')
    assert [(each.network, each.url, each.weight) for each in found.upstreams] == [("base/sepolia", expected, 2.0)]
    assert found.upstreams[0].name == url.partition(":")[0]


def test_first_network_of_a_quicknode_endpoint_has_no_name_in_the_url(tmp_path: Path) -> None:
    found = loaded(tmp_path, f'[[upstreams]]\nnetwork = "ethereum/mainnet"\nurl = "quicknode://calm/{KEY}"\n')
    assert found.upstreams[0].url == f"https://calm.quiknode.pro/{KEY}"


def test_block_without_a_network_stands_for_all_and_patterns_choose(tmp_path: Path) -> None:
    every = loaded(tmp_path, f'[[upstreams]]\nurl = "ankr://{KEY}"\n')
    assert {each.network for each in every.upstreams} == set(PROVIDERS["ankr"].networks)
    some = loaded(tmp_path, f'[[upstreams]]\nnetwork = ["base/*", "moonbeam/mainnet"]\nurl = "alchemy://{KEY}"\n')
    assert {each.network for each in some.upstreams} == {"base/mainnet", "base/sepolia", "moonbeam/mainnet"}


def test_bundlers_have_providers_too(tmp_path: Path) -> None:
    found = loaded(tmp_path, f'[[bundlers]]\nnetwork = "base/mainnet"\nurl = "pimlico://{KEY}"\n')
    assert [each.url for each in found.bundlers] == [f"https://api.pimlico.io/v2/8453/rpc?apikey={KEY}"]
    assert faults(tmp_path, f'[[upstreams]]\nurl = "pimlico://{KEY}"\n') == (
        f"{tmp_path}/penstock.toml:6: upstreams.0.url: Pimlico is for [[bundlers]]",
    )


def test_two_keys_of_a_provider_and_plain_urls_go_together(tmp_path: Path) -> None:
    block = '[[upstreams]]\nnetwork = "base/mainnet"\nurl = "{}"\n'
    urls = (f"alchemy://{KEY}", "https://own.example/", f"alchemy://{KEY}2")
    found = loaded(tmp_path, "".join(block.format(url) for url in urls))
    assert [each.name for each in found.upstreams] == ["", "alchemy", "alchemy-key2"]


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ('[[upstreams]]\nurl = "alchemi://KEY"\n', "9: upstreams.1.url: there is no provider alchemi; did you mean alchemy://?"),
        ('[[upstreams]]\nnetwork = "base/mainnet"\nurl = "ftp://KEY"\n', "10: upstreams.1.url: there is no provider ftp;"),
        ('[[upstreams]]\nurl = "quicknode://KEY"\n', "9: upstreams.1.url: write quicknode://NAME/TOKEN"),
        ('[[upstreams]]\nurl = "alchemy://"\n', "9: upstreams.1.url: write alchemy://KEY"),
        ('[[upstreams]]\nurl = "chainstack://KEY"\n', "8: upstreams.1.network: is required: Chainstack has a key"),
        ('[[upstreams]]\nnetwork = "solana/*"\nurl = "alchemy://KEY"\n', "9: upstreams.1.network: alchemy has no network sol"),
        ('[[upstreams]]\nnetwork = 1\nurl = "alchemy://KEY"\n', "9: upstreams.1.network: must be the name of a network"),
        ('[[upstreams]]\nurl = "repository://h/p"\n', "9: upstreams.1.url: nothing is fetched at start"),
        ('[[upstreams]]\nurl = "repository:///none"\n', "9: upstreams.1.url: /none: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_fault_has_file_and_line_and_no_key(tmp_path: Path, block: str, fault: str) -> None:
    first = '[[upstreams]]\nnetwork = "base/mainnet"\nurl = "https://own.example/"\n'
    text = (first + block).replace("KEY", KEY)
    (found,) = [each for each in faults(tmp_path, text) if each.startswith(str(tmp_path))]
    assert found.startswith(f"{tmp_path}/penstock.toml:{fault}")
    assert KEY not in found


def test_public_upstreams_come_from_a_file(tmp_path: Path) -> None:
    listed = {
        "8453": {"endpoints": ["https://a.example/", "wss://b.example", "https://c.example/"]},
        "999888777": {"endpoints": []},
    }
    (tmp_path / "public.json").write_bytes(orjson.dumps(listed))
    found = loaded(tmp_path, f'[[upstreams]]\nurl = "repository://{tmp_path}/public.json"\ntier = 1\n')
    assert [(each.network, each.url, each.name, each.tier) for each in found.upstreams] == [
        ("base/mainnet", "https://a.example/", "repository", 1),
        ("base/mainnet", "https://c.example/", "repository-2", 1),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", ":1: must be JSON like"),
        ("{}", ":1: must be JSON like"),
        ('{\n"1": {"endpoints": ["https://a.example"]},\n"8453": }', ":3: is not JSON: "),
        ('{\n"1": {"endpoints": []},\n\n"8453": {"urls": []}}', ":4: 8453: must have a list of URLs"),
        ('{\n"8453": ["https://a.example"]}', ":2: 8453: must have a list of URLs"),
        ('{\n"8453": {"endpoints": ["https://a.example", 7]}}', ":2: 8453.endpoints: must have URLs only"),
        ('{"8453": {"endpoints": ["a.example"]}}', ":1: 8453.endpoints: must have URLs only"),
        ("[" * 100_000, ":1: is "),
        ("\udcff", ": is not text in UTF-8 (byte 0)"),
    ],
)
def test_fault_in_a_list_of_public_upstreams_has_file_and_line(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "public.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (found, *_) = faults(tmp_path, f'[[upstreams]]\nurl = "repository://{tmp_path}/public.json"\n')
    assert found.startswith(f"{tmp_path}/penstock.toml:6: upstreams.0.url: {tmp_path}/public.json{fault}")


def test_key_is_masked_wherever_settings_are_printed(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    for url in (f"alchemy://{KEY}", f"drpc://{KEY}", f"quicknode://calm/{KEY}", f"base/mainnet=infura://{KEY}"):
        file.unlink(missing_ok=True)
        done = command_here("init", str(file), "--upstream", url)
        assert (done.returncode, KEY in done.stdout + done.stderr) == (0, False)
        assert KEY in file.read_text()
        done = command_here("check", "--offline", "--config", str(file))
        assert (done.returncode, done.stderr, KEY in done.stdout) == (0, "", False)
    done = command_here("init", str(tmp_path / "b.toml"), "--upstream", f"alchemi://{KEY}")
    assert (done.returncode, done.stderr) == (
        2, "penstock: --upstream: there is no provider alchemi; did you mean alchemy://?\n"
    )  # fmt: skip


def test_networks_of_a_provider_are_listed_without_a_call() -> None:
    found = orjson.loads(command_here("chains", "list", "base/", "--provider", "alchemy", "--json").stdout)
    assert found[0] == {
        "network": "base/mainnet",
        "title": "Base",
        "id": "8453",
        "class": "live",
        "url": "https://base-mainnet.g.alchemy.com/v2/********",
    }
    assert "there are: alchemy, ankr" in command_here("chains", "list", "--provider", "nobody").stderr


LISTED = {
    "result": {
        "data": [
            {"networkChainId": 8453, "kebabCaseId": "base-main"},
            {"networkChainId": 1, "kebabCaseId": "eth", "is_open": False},
            {"networkChainId": "0x44d", "kebabCaseId": "zkevm", "is_open": True, "rank": 1},
            {"networkChainId": "1101", "kebabCaseId": "zkevm-2", "is_open": True, "rank": 2},
            {"networkChainId": 987654321987, "kebabCaseId": "nowhere", "is_open": True},
            {"networkChainId": 10, "kebabCaseId": "op/../x", "is_open": True},
            {"networkChainId": True, "kebabCaseId": "yes", "is_open": True},
            {"networkChainId": "ten", "kebabCaseId": "ten", "is_open": True},
            {"networkChainId": 137, "kebabCaseId": "poly", "is_open": True},
            "polygon",
        ]
    }
}
ACME = """\
# Own.
title = "Acme"
url = "https://{{network}}.acme.example/{{key}}"
[list]
url = "{url}"
entries = "result.data"
chain_id = "networkChainId"
name = "kebabCaseId"
where = {{ is_open = true }}
prefer = "rank"
[networks]
"polygon/mainnet" = "matic"
"base/mainnet" = "b"
"solana/mainnet" = "sol"
# Prices.
[credits]
unit = "u"
date = "2026-01-01"
source = "https://acme.example"
default = 1
"""


@contextmanager
def serving(status: int, body: bytes) -> Iterator[str]:
    """A web server that replies to everything with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/list"
    server.shutdown()
    server.server_close()
    thread.join()


def acme(tmp_path: Path, url: str) -> list[str]:
    """Settings with a provider of the operator, whose list is at this URL; the words that name it."""
    own = tmp_path / "own"
    (own / "providers").mkdir(parents=True, exist_ok=True)
    (own / "providers" / "acme.toml").write_text(ACME.format(url=url))
    (tmp_path / "penstock.toml").write_text(f'{REQUIRED}[data_files]\ndirectory = "{own}"\n')
    return ["chains", "list", "--provider", "acme", "--config", str(tmp_path / "penstock.toml")]


def test_own_list_of_a_provider_is_asked_for_and_written(tmp_path: Path) -> None:
    with serving(200, orjson.dumps(LISTED)) as url:
        words = acme(tmp_path, url)
        done = command_here(*words, "--refresh", "--write", str(tmp_path / "new.toml"))
        assert done.returncode == 0, done.stderr
        listed = orjson.loads(command_here(*words, "--refresh", "--json").stdout)
        again = command_here(*words, "--refresh", "--write", str(tmp_path / "new.toml"))
    assert "not known here, see `penstock chains add`: 987654321987" in done.stdout
    assert {each["network"]: (each["url"].split("/")[2].split(".")[0], each["change"]) for each in listed} == {
        "solana/mainnet": ("sol", ""),
        "polygon-zkevm/mainnet": ("zkevm-2", "new"),
        "polygon/mainnet": ("poly", "was matic"),
        "base/mainnet": ("b", "gone"),
    }
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    text = (tmp_path / "new.toml").read_text()
    before, after = ACME.format(url=url).split("[networks]")
    assert text.startswith(before)
    assert text.endswith("# Prices." + after.split("# Prices.")[1])
    (tmp_path / "own" / "providers" / "acme.toml").write_text(text)
    found = loaded(tmp_path, f'[data_files]\ndirectory = "{tmp_path}/own"\n[[upstreams]]\nurl = "acme://{KEY}"\n')
    assert {each.network for each in found.upstreams} == {"solana/mainnet", "polygon-zkevm/mainnet", "polygon/mainnet"}


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (503, b"", "replied with status 503"),
        (302, b"", "replied with status 302"),
        (200, b'{\n"result": ', ":2: is not JSON"),
        (200, b"[]", "has no networks in the expected form"),
        (200, b'{"result": {"data": [{"networkChainId": 1}]}}', "has no networks in the expected form"),
        (200, b'{"result": {"data": {"a": [[[]]]}}}', "has no networks in the expected form"),
    ],
)
def test_list_that_cannot_be_used_is_an_error_and_writes_nothing(
    tmp_path: Path, status: int, body: bytes, fault: str
) -> None:
    with serving(status, body) as url:
        done = command_here(*acme(tmp_path, url), "--refresh", "--write", str(tmp_path / "new.toml"))
    assert (done.returncode, fault in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "new.toml").exists()


def test_refresh_needs_a_provider_that_has_a_list(tmp_path: Path) -> None:
    for words, fault in (
        (("--provider", "ankr", "--refresh"), "Ankr has no list"),
        (("--refresh",), "name the provider"),
        (("--provider", "alchemy", "--write", str(tmp_path / "x")), "add --refresh"),
        (("--provider", "repository://host/path"), "add --refresh"),
        (("--provider", f"repository://{tmp_path}/none"), "cannot be read"),
    ):
        done = command_here("chains", "list", *words)
        assert (done.returncode, fault in done.stderr) == (2, True), (words, done.stderr)
    with serving(200, b"{}") as url:
        gone = url
    done = command_here(*acme(tmp_path, gone), "--refresh")
    assert (done.returncode, "does not reply" in done.stderr) == (2, True)


def test_shipped_lists_are_read_as_their_providers_write_them() -> None:
    """The forms are those that eRPC reads."""
    alchemy = {"result": {"data": [{"networkChainId": 8453, "kebabCaseId": "base-mainnet"}]}}
    chain = {"api_type": "jsonrpc", "blockchain_type": "eth", "has_premium": True}
    drpc = [
        {"id": "custom", "chains": [{"name": "custom", "chain_id": "0x67932", "priority": 100, **chain}]},
        {"id": "base", "chains": [
            {"name": "base-old", "chain_id": "0x2105", "priority": 1, **chain},
            {"name": "base", "chain_id": "0x2105", "priority": 2, **chain},
            {"name": "base-rest", "chain_id": "0x2105", "priority": 3, **chain, "api_type": "rest"},
        ]},
    ]  # fmt: skip
    for name, data, expected in (
        ("alchemy", alchemy, {8453: "base-mainnet"}),
        ("drpc", drpc, {424242: "custom", 8453: "base"}),
    ):
        own_list = PROVIDERS[name].own_list
        assert own_list is not None
        assert names_by_id(own_list, data) == expected


def test_public_upstreams_of_a_file_are_listed(tmp_path: Path) -> None:
    (tmp_path / "public.json").write_text('{"8453": {"endpoints": ["https://a.example/", "wss://b.example"]}}')
    words = ("chains", "list", "--provider", f"repository://{tmp_path}/public.json", "--json")
    (found,) = orjson.loads(command_here(*words).stdout)
    assert (found["network"], found["url"]) == ("base/mainnet", "https://a.example/")


def test_operators_file_replaces_a_provider(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "providers").mkdir(parents=True)
    (own / "providers" / "acme.toml").write_text(
        'title = "Acme"\nurl = "https://{network}.acme.example/{key}"\n[networks]\n"base/mainnet" = "b"\n'
    )
    found = loaded(tmp_path, f'[data_files]\ndirectory = "{own}"\n[[upstreams]]\nurl = "acme://{KEY}"\n')
    assert [each.url for each in found.upstreams] == [f"https://b.acme.example/{KEY}"]
    (own / "providers" / "acme.toml").write_text('title = "Acme"\n')
    assert any(
        "acme.toml" in each
        for each in faults(tmp_path, f'[data_files]\ndirectory = "{own}"\n[[upstreams]]\nurl = "acme://K"\n')
    )


def test_line_of_a_setting_is_found() -> None:
    text = "[[a]]\nx = 1\n[[ a ]] # two\ny = 2\n[b]\nx = 3\n"
    assert [line_of(text, name) for name in ("a.0.x", "a.0.y", "a.1.y")] == [2, 1, 4]
    assert [line_of(text, "a.1.x"), line_of(text, "a.2.x"), line_of("", "a.0.x")] == [3, None, None]


def test_line_of_a_key_with_dots_or_slashes_is_found() -> None:
    text = '[m."GET /a.b/{c}"]\nx = 1\n[[r]]\n"GET /y" = 1\n[t]\n"POST /q.json" = { x = 1,\n y = 2 }\n"2.0" = 3\n'
    names = ("m.GET /a.b/{c}", "m.GET /a.b/{c}.x", "r.0.GET /y", "t.POST /q.json.y", "t.2.0", "r")
    assert [line_of(text, name) for name in names] == [1, 2, 4, 7, 8, 3]
