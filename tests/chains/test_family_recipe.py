"""The recipe for a new chain family in CONTRIBUTING.md, followed to the letter.

Its files are written to a directory outside of the package, and its command calls the service. With a fault in them, they are
refused at the start.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.errors import StartError
from proxy.settings import load_tables
from tests.client_scripts import ENVIRONMENT
from tests.families_harness import served
from tests.guide_pages import PageBlock, blocks_in
from tests.node_stubs import NodeError, NodeStub
from tests.service import ROOT
from tests.web import worker as worker_module
from tests.web.worker import on_uvloop

HEADING = "### Add a chain family"


class PondStub(NodeStub):
    network = "duckpond/mainnet"
    chain = "duckpond-1"

    def answer(self, method: str, params: Any) -> Any:
        match method:
            case "pond_height":
                return self.head
            case "pond_name":
                return self.chain
            case "pond_ripple":
                height = params["height"] if isinstance(params, dict) else params[0]
                if height > self.head:
                    raise NodeError(1, "no such ripple")
                return {"ripple": height}
            case "pond_throw":
                return self.take(params)
            case _:
                raise NodeError(-32601, "method not found")


def recipe() -> list[PageBlock]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return blocks_in(text.partition(HEADING)[2].partition("\n### ")[0])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for block in recipe():
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text, "utf-8")
    return tmp_path


@on_uvloop
async def test_recipe_works(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "TABLES", load_tables(own=str(own)))
    (command,) = [block.text for block in recipe() if block.language == "bash"]
    stub = PondStub()
    async with served(stub, PondStub()) as harness:
        named = {"PENSTOCK": f"http://127.0.0.1:{harness.worker.port}", "API_KEY": harness.worker.keys["main"]}
        call = ["bash", "-ec", command]
        done = await asyncio.to_thread(
            subprocess.run,
            call,
            env={**ENVIRONMENT, **os.environ, **named},
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert orjson.loads(done.stdout)["result"] == {"ripple": 7}
        assert await harness.result("pond_height") == stub.head
        cached = await harness.call("pond_ripple", [7])
        assert (cached.json["result"], cached.headers["x-compute-units"]) == ({"ripple": 7}, "2")
        refused = await harness.call("pond_drain")
        assert "it changes the node" in refused.json["error"]["message"]


def faults_of(own: Path, file: str, before: str, after: str) -> str:
    """The first fault. Others follow from it, because nothing of the file is used."""
    path = own / file
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after), "utf-8")
    with pytest.raises(StartError) as caught:
        load_tables(own=str(own))
    return caught.value.faults[0]


@pytest.mark.parametrize(
    ("file", "before", "after", "fault"),
    [
        (
            "families/pond.toml",
            'title = "Pond"',
            'title = "Pond"\ncolour = 1',
            "pond.toml: colour: there is no such key (line 3)",
        ),
        (
            "methods/pond.toml",
            "pond_throw =",
            "pond_drain =",
            "pond.toml: methods.pond_drain: the family's file has it under `refused`: remove it here or there (line 7)",
        ),
        ("methods/pond.toml", "pond_throw =", "pond_name =", "pond.toml: not valid TOML: Cannot overwrite a value (at line 7"),
        (
            "methods/pond.toml",
            "pond_throw =",
            '"GET /throw" =',
            "pond.toml: methods.GET /throw: is a route, and the family has no REST transport (line 7)",
        ),
    ],
)  # fmt: skip
def test_fault_is_named_with_its_file_and_line(own: Path, file: str, before: str, after: str, fault: str) -> None:
    assert faults_of(own, file, before, after).removeprefix(f"{own}/methods/").startswith(fault)


def test_method_of_two_files_is_refused(own: Path) -> None:
    (own / "methods" / "more.toml").write_text('family = "pond"\n[methods]\npond_name = { price = 2 }\n')
    with pytest.raises(StartError) as caught:
        load_tables(own=str(own))
    (fault,) = caught.value.faults
    assert fault == "pond.toml: methods.pond_name: already defined in another file (line 5)"


REST = """
name = "pond"
title = "Pond"
[transport.rest]
[lookups.number]
calls = [{ method = "GET /height", params = {}, read = { number = "body.height" } }]
[lookups.chain]
calls = [{ method = "GET /height", params = {}, read = { chain = "body.name" } }]
"""
ROUTES = """family = "pond"
[methods]
"GET /height" = { price = 1 }
"GET /ripples/{height}" = { price = 1 }
"GET /ripples/newest" = { price = 1 }
"""


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        ("GET /{kind}/newest", "some paths match GET /ripples/{height} as well: leave one of both out"),
        ("POST /{kind}/newest", "some paths match GET /ripples/{height} as well: leave one of both out"),
        ("GET /ripples/{number}", "another route calls {number} {height}: use one name"),
        ("GET /ripples/{number}/ducks", "another route calls {number} {height}: use one name"),
        ("GET /../height", "must not contain dot segments"),
        ("GET /a/{x}/b/{x}", "has a placeholder twice"),
    ],
)
def test_path_that_matches_two_routes_is_refused(own: Path, route: str, fault: str) -> None:
    (own / "families" / "pond.toml").write_text(REST.lstrip())
    (own / "methods" / "pond.toml").write_text(ROUTES)
    load_tables(own=str(own))
    (own / "methods" / "pond.toml").write_text(f'{ROUTES}"{route}" = {{ price = 1 }}\n')
    with pytest.raises(StartError) as caught:
        load_tables(own=str(own))
    assert [*caught.value.faults] == [f"pond.toml: methods.{route}: {fault} (line 6)"]
