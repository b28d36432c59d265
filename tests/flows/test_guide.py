"""Every command and program in the guide runs, and the guide builds offline and is served."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bench import guide_table
from proxy import settings
from proxy.__main__ import COMMANDS
from proxy.data_files import CONFIG
from proxy.dev.run import metrics_defaults
from proxy.web.docs.guide_files import GuideFiles
from tests import programs
from tests.certificates import Authority
from tests.database import Server, connected
from tests.guide_pages import CODE, HOST_PAGE, PAGES, PageBlock, blocks_of, free_port, run_page
from tests.metering_upstream import NodeProvider
from tests.real_harness import BASE, DEV
from tests.real_nodes import geth_nodes, hardhat_nodes
from tests.service import ROOT, Service, node_session

WITHIN_S = 170.0
ALL = sorted(PAGES.rglob("*.md"))
# Names Ethereum's mainnet throughout, so it runs on a chain with that id.
MOVE_PAGE = PAGES / "move.md"
# Compares real nodes with providers.
UPSTREAMS_PAGE = PAGES / "upstreams.md"
# Pages with code that runs here, with the development chain.
RUNNING = [
    page
    for page in ALL
    if page not in (HOST_PAGE, MOVE_PAGE, UPSTREAMS_PAGE)
    and any(not block.reason and block.language in CODE for block in blocks_of(page))
]


def test_code_runs_or_says_why_not() -> None:
    for page in ALL:
        for block in blocks_of(page):
            shown = (page.name, block.text[:60])
            runs = block.language in {"bash", "python", "js", "ts"} or block.title or block.language not in CODE
            assert runs or block.reason, shown


def test_programs_that_the_guide_needs_are_installed() -> None:
    lacks = {block.reason for page in ALL for block in blocks_of(page) if block.reason.endswith("is not installed")}
    if lacks:
        pytest.skip(f"{', '.join(sorted(lacks))}: some blocks were not run")


def test_files_of_the_guide_are_used() -> None:
    """A block that only writes a file would not be tested."""
    for page in ALL:
        blocks = [block for block in blocks_of(page) if not block.reason]
        for index, block in enumerate(blocks):
            if block.title and block.language in CODE:
                assert any(block.title in later.text for later in blocks[index + 1 :]), (page.name, block.title)


@pytest.mark.parametrize("page", ALL, ids=[page.stem for page in ALL])
def test_named_settings_and_metrics_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    sections = tomllib.loads((CONFIG / "default.toml").read_text("utf-8"))
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "penstock" / "values.yaml").read_text("utf-8"))
    for section, name in re.findall(r"`(\w+)\.(\w+)(?: = [^`]+)?`", text):
        if section in sections and name not in chart.get(section, {}):
            assert name in sections[section], f"{section}.{name}"
    source = "".join(file.read_text("utf-8") for file in (ROOT / "proxy").rglob("*.py"))
    for metric in re.findall(r"`(penstock_[a-z_]+)`", text):
        assert f'"{metric.removesuffix("_total")}' in source, metric


def test_figures_of_the_guide_come_from_one_table() -> None:
    made = guide_table.table((ROOT / "bench" / "summary.md").read_text("utf-8"))
    assert (ROOT / "bench" / "figures.md").read_text("utf-8") == made, "run python -m bench.guide_table"
    including = {page.stem for page in ALL if '--8<-- "bench/figures.md"' in page.read_text("utf-8")}
    assert including == {"production", "benchmarks"}
    for page in ALL:
        stated = re.findall(
            r"^\| (?:small calls?|cache hits?)\b[^|]* \| [\d,]+[^|]*per second", page.read_text("utf-8"), re.M
        )
        assert not stated, (page.name, stated)


def test_prices_in_the_guide_are_those_of_the_tables() -> None:
    """Rows such as | `eth_getLogs` | 8 |."""
    tables = settings.load_tables()
    text = (PAGES / "limits.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\d+) \|$", text, re.MULTILINE)
    named = {name: int(units) for names, units in rows for name in re.findall(r"`(\w+)`", names)}
    assert named.keys() >= {"eth_chainId", "eth_blockNumber", "eth_getLogs"}
    assert named == {name: tables.price_of("ethereum/mainnet", name) for name in named}


def written_in(language: str) -> list[PageBlock]:
    return [block for page in ALL for block in blocks_of(page) if block.language == language]


def test_settings_of_the_guide_are_valid(tmp_path: Path) -> None:
    leaf = Authority(tmp_path).leaf("rpc.example.com")
    examples = {
        "/etc/penstock/tls/fullchain.pem": str(leaf.cert),
        "/etc/penstock/tls/privkey.pem": str(leaf.key),
        "0x…": f"0x{'22' * 20}",
    }
    environ = {
        "DATABASE_URL": "postgresql:///a",
        "PENSTOCK_KEYS__PEPPER": "0" * 32,
        "PAYMASTER_SIGNER": "0x" + "11" * 32,
        "RELAY_SIGNER": "0x" + "11" * 32,
    }
    blocks = written_in("toml")
    assert len(blocks) >= 5
    for block in blocks:
        text = block.text
        for shown, value in examples.items():
            text = text.replace(shown, value)
        (file := tmp_path / "penstock.toml").write_text(text)
        settings.load_with_tables(file, environ=environ)


async def test_sql_of_the_guide_runs(server: Server) -> None:
    name = await server.create("migrated")
    async with connected(server.url(name)) as connection:
        for block in written_in("sql"):
            await connection.execute(block.text)
    await server.drop(name)


@programs.needs("promtool")
def test_prometheus_accepts_the_file_of_the_guide(tmp_path: Path) -> None:
    shutil.copy(ROOT / "deploy" / "prometheus" / "rules.yml", tmp_path)
    [block] = written_in("yaml")
    (tmp_path / "prometheus.yml").write_text(block.text)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)


class CommandParser(argparse.ArgumentParser):
    """Accepts a command without its required arguments: the guide often only names it."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(("the following arguments are required", "one of the arguments")):
            raise EOFError
        raise ValueError(message)


def named_commands(page: Path) -> Iterator[str]:
    """Commands in the text, and in blocks that do not run."""
    yield from re.findall(r"(?<!`)`penstock ([^`]+)`", page.read_text("utf-8"))
    for block in blocks_of(page):
        if block.reason and block.language == "bash":
            lines = block.text.replace("\\\n", "").splitlines()
            found = [re.search(r"(?:^|\(|&& |bin/)penstock ([a-z].*)", line) for line in lines]
            yield from (re.split(r" [|>&#]", match[1])[0] for match in found if match)


@pytest.mark.parametrize("page", ALL, ids=[page.stem for page in ALL])
def test_named_commands_exist(page: Path) -> None:
    for command in named_commands(page):
        words = shlex.split(command)
        parser = CommandParser()
        import_module(f"proxy.commands.{COMMANDS[words[0]]}").register(parser.add_subparsers())
        try:
            parser.parse_args(words)
        except EOFError:
            pass
    targets = re.findall(r"(?:`|^)make ([a-z0-9-]+)", page.read_text("utf-8"), re.MULTILINE)
    assert {*targets} <= {*re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)}


@pytest.mark.parametrize("page", ALL, ids=[page.stem for page in ALL])
def test_programs_import_what_the_oldest_node_lacks(page: Path) -> None:
    """Node 20, the stated minimum, has no global WebSocket."""
    for block in blocks_of(page):
        if block.language in ("js", "ts") and "new WebSocket(" in block.text:
            assert "import WebSocket from" in block.text, block.text[:200]


@pytest.mark.parametrize(("given", "port"), [(None, 9545), (0, 0), (8600, 0)])
def test_metrics_of_a_development_service_are_where_the_guide_says(given: int | None, port: int) -> None:
    needed = {"database": {"url": "postgresql://localhost"}, "keys": {"pepper": "-" * 32}}
    found = settings.load(environ={}, defaults={"metrics": metrics_defaults(given)}, overrides=needed)
    assert found.metrics.port == port


@pytest.mark.parametrize("page", RUNNING, ids=[page.stem for page in RUNNING])
async def test_page_runs(bundled: Service, server: Server, tmp_path: Path, page: Path) -> None:
    name, empty = await server.create(), await server.create()
    ready = bundled.ready
    environ = {
        "API_KEY": bundled.keys["enterprise"],
        "TEST_KEY": bundled.keys["test"],
        "PRIVATE_KEY": ready["funded_account"]["private_key"],
        "ADMIN_TOKEN": ready["admin_token"],
        "DATABASE_URL": server.url(name),
        "EMPTY_DATABASE_URL": server.url(empty),
        "PENSTOCK_DATA": str(bundled.data),
        "UPSTREAM_URL": ready["upstream_url"],
    }
    replace = {
        "127.0.0.1:8545": f"127.0.0.1:{bundled.port}",
        "http://127.0.0.1:9545/metrics": ready["metrics_url"],
        # A second service beside it, with the same node.
        "ethereum/mainnet=$UPSTREAM_URL": "dev/mainnet=$UPSTREAM_URL",
        "9000/v1/rpc/ethereum/mainnet": "9000/v1/rpc/dev/mainnet",
        "9000": str(free_port()),
        "9001": str(free_port()),
    }
    if "ACCOUNT_KEY" in page.read_text("utf-8"):
        account = await bundled.new_account("growth")
        scopes = [word for each in ("keys:manage", "usage:read", "rpc:read") for word in ("--scope", each)]
        environ["ACCOUNT_KEY"] = (await bundled.new_key(account["id"], "--mode", "live", *scopes))["key"]
    try:
        output = await asyncio.to_thread(
            run_page, page, tmp_path / "room", environ=environ, replace=replace, within_s=WITHIN_S
        )
    finally:
        await server.drop(name)
        await server.drop(empty)
    # Replies that the page shows.
    for block in blocks_of(page):
        if block.language == "json":
            assert json.dumps(json.loads(block.text), separators=(",", ":"), ensure_ascii=False) in output


async def test_move_from_alchemy_erpc_and_metamask_runs_as_it_is_written(server: Server, tmp_path: Path) -> None:
    name = await server.create()
    ports = {"9000": str(free_port()), "9001": str(free_port())}
    with hardhat_nodes(1, chain_ids=[1]) as (node,):
        environ = {"DATABASE_URL": server.url(name), "UPSTREAM_URL": node.url}
        try:
            output = await asyncio.to_thread(
                run_page, MOVE_PAGE, tmp_path / "room", environ=environ, replace=ports, within_s=WITHIN_S
            )
        finally:
            await server.drop(name)
    # Nothing was left out but the values of the reader.
    assert [block.reason for block in blocks_of(MOVE_PAGE) if block.reason] == ["your own values"]
    assert output.count("balance 10000000000000000000000") == 2


@pytest.mark.timeout(600)
async def test_upstream_is_known_tried_and_budgeted_as_it_is_written(server: Server, tmp_path: Path) -> None:
    name = await server.create()
    replace = {"ethereum/mainnet": DEV, "9000": str(free_port()), "9001": str(free_port())}
    with geth_nodes(2, tmp_path / "geth") as nodes:
        async with node_session() as session, AsyncExitStack() as stack:
            for node in nodes:
                node.session = session
                await node.follow(BASE)
            providers = [NodeProvider(nodes[1], each) for each in ("alchemy", "quicknode")]
            for each in providers:
                await each.open()
                stack.push_async_callback(each.close)
            environ = {
                "DATABASE_URL": server.url(name),
                "NODE_URL": nodes[0].url,
                "PROVIDER_URL": providers[0].url,
                "OTHER_URL": providers[1].url,
            }
            try:
                output = await asyncio.to_thread(
                    run_page, UPSTREAMS_PAGE, tmp_path / "room", environ=environ, replace=replace, within_s=500.0
                )
            finally:
                await server.drop(name)
    assert not [block.reason for block in blocks_of(UPSTREAMS_PAGE) if block.reason]
    assert output.count("safe to promote: ") >= 3
    assert all(each.billed > 0 for each in providers)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide, built as `make docs` does."""
    out = tmp_path_factory.mktemp("guide") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(?:https?:)?//', re.IGNORECASE)
    for page in site.rglob("*.html"):
        assert loads.search(page.read_text("utf-8")) is None, page.name


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("troubleshooting", "troubleshooting/"),
        ("sizing", "production/#size"),
        ("metamask", "troubleshooting/#metamask-and-other-wallets"),
        ("wrong_chain", "troubleshooting/#an-upstream-gets-no-calls"),
        ("penstockdown", "runbook/#penstockdown"),
        ("unreleased", "changelog/#unreleased"),
        ("upgrade", "upgrades/#upgrade"),
    ],
)
def test_search_finds_what_operators_look_for(site: Path, word: str, page: str) -> None:
    sections = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    found = {each["location"] for each in sections if word in f"{each['title']} {each['text']}".lower()}
    assert page in found


async def test_guide_is_served_with_a_strict_policy(site: Path) -> None:
    application = web.Application()
    application.add_routes(GuideFiles(site).routes())
    async with TestClient(TestServer(application)) as client:
        index = await client.get("/docs/guide")
        assert str(index.url).endswith("/docs/guide/")
        assert (index.status, index.content_type) == (200, "text/html")
        policy = index.headers["Content-Security-Policy"]
        assert "script-src 'self' 'sha256-" in policy
        assert (await client.get("/docs/guide/quickstart/")).status == 200
        assert (await client.get("/docs/guide/images/logo.svg")).content_type == "image/svg+xml"
        again = await client.get("/docs/guide/", headers={"If-None-Match": index.headers["ETag"]})
        assert again.status == 304
        for name in ("nothing", "../proxy/errors.py", "%2e%2e/setup.py"):
            assert (await client.get(f"/docs/guide/{name}")).status == 404


def test_index_for_language_models_links_every_page(site: Path) -> None:
    links = GuideFiles(site).links()
    assert links[0] == "[Guide](/docs/guide/)"
    assert "[Sponsor gas](/docs/guide/sponsor-gas/)" in links
    assert len(links) == len(ALL)


async def test_checkout_without_a_built_guide_says_how_to_build_it(tmp_path: Path) -> None:
    application = web.Application()
    application.add_routes(GuideFiles(tmp_path / "none").routes())
    async with TestClient(TestServer(application)) as client:
        reply = await client.get("/docs/guide/quickstart/")
        assert (reply.status, "make docs" in await reply.text()) == (200, True)
