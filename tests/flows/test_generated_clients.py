"""The generated clients: every operation with a key, types that a type checker accepts, and requests to a running service."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.dev.npm_packages import node_binary
from proxy.settings import SCHEMAS
from proxy.web import api_spec
from proxy.web.docs.client_code import LANGUAGES, client_module
from tests.client_scripts import ENVIRONMENT, SCRIPTS
from tests.service import ROOT, Service, command

SPEC = api_spec.load(SCHEMAS)
# The operations that take a key; copies of others are left out.
WITH_KEY = {
    name
    for name, each in SPEC.operations.items()
    if (each.session is None or each.scope) and not name.startswith("account_")
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clients, as the command writes them."""
    room = tmp_path_factory.mktemp("clients")
    done = command("clients", "--directory", str(room))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(str(room / each.file) for each in LANGUAGES.values())
    return room


def test_clients_have_a_method_for_every_operation_with_a_key(written: Path) -> None:
    (client,) = (
        each
        for each in ast.parse((written / "penstock_client.py").read_text()).body
        if isinstance(each, ast.ClassDef) and each.name == "Penstock"
    )
    assert {each.name for each in client.body if isinstance(each, ast.FunctionDef)} == WITH_KEY
    text = (written / "penstock.ts").read_text()
    for name in WITH_KEY:
        camel = "".join(part.capitalize() for part in name.split("_"))
        assert f"  {camel[0].lower()}{camel[1:]}(" in text


def test_python_client_passes_the_strict_type_checker(written: Path) -> None:
    uses = """
from penstock_client import ApiKey, Penstock

penstock = Penstock("http://127.0.0.1", "key")
key: ApiKey = penstock.list_keys()["keys"][0]
made = penstock.create_key({"name": "x", "mode": "live", "scopes": ["rpc:read"]})
secret: str = made["key"]
penstock.list_webhooks(page=2, limit=10)
penstock.create_key({"name": "x"})  # type: ignore[typeddict-item]
penstock.update_key("key_1", {"nonsense": 1})  # type: ignore[typeddict-unknown-key]
"""
    (written / "uses.py").write_text(uses)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(written / "cache"), "uses.py"],
        cwd=written,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_typescript_client_passes_the_strict_type_checker(written: Path) -> None:
    uses = """
import { Penstock, PenstockError, type ApiKey } from "./penstock.ts";

const penstock = new Penstock("http://127.0.0.1", "key");
export const key: ApiKey | undefined = (await penstock.listKeys()).keys[0];
export const made = await penstock.createKey({ name: "x", mode: "live", scopes: ["rpc:read"] });
export const secret: string = made.key;
export const reason = (error: unknown) => (error instanceof PenstockError ? error.reason : "");
await penstock.listWebhooks({ page: 2, limit: 10 });
// @ts-expect-error: the mode is required
await penstock.createKey({ name: "x" });
// @ts-expect-error: there is no such member
await penstock.updateKey("key_1", { nonsense: 1 });
// @ts-expect-error: there is no such mode
await penstock.createKey({ name: "x", mode: "maybe" });
"""
    (written / "uses.mts").write_text(uses)
    words = "--noEmit --strict --noUncheckedIndexedAccess --exactOptionalPropertyTypes --allowImportingTsExtensions"
    target = "--module nodenext --target es2022 --lib es2022,dom"
    compiler = SCRIPTS / "node_modules" / "typescript" / "bin" / "tsc"
    done = subprocess.run(
        [str(node_binary()), str(compiler), *words.split(), *target.split(), "uses.mts"],
        cwd=written,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_module_is_the_same_each_time() -> None:
    for kind in LANGUAGES.values():
        assert client_module(SPEC.document, kind, SCHEMAS) == client_module(SPEC.document, kind, SCHEMAS)


PYTHON = """
import json, os
from penstock_client import Penstock, PenstockError

penstock = Penstock(os.environ["URL"], os.environ["KEY"])
made = penstock.create_key({"name": "from a client", "mode": "live", "scopes": ["rpc:read"], "note": "ü/?"})
read = penstock.read_key(made["id"])
changed = penstock.update_key(made["id"], {"note": "changed"})
call = penstock.rpc_call("dev", "mainnet", {"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []})
table = penstock.export_usage()
try:
    penstock.create_key({"name": "too much", "mode": "live", "scopes": ["gas:manage"]})
except PenstockError as error:
    refused = [error.status, error.code, error.reason, error.param, error.request_id != ""]
revoked = penstock.revoke_key(made["id"])
penstock.list_chains()
print(json.dumps([read["note"], changed["note"], call["result"], table.splitlines()[0], refused, revoked["revoked"]]))
"""
TYPESCRIPT = """
import { Penstock, PenstockError } from "./penstock.ts";

const penstock = new Penstock(process.env.URL!, process.env.KEY!);
const made = await penstock.createKey({ name: "from a client", mode: "live", scopes: ["rpc:read"], note: "ü/?" });
const read = await penstock.readKey(made.id);
const changed = await penstock.updateKey(made.id, { note: "changed" });
const call: any = await penstock.rpcCall("dev", "mainnet", { jsonrpc: "2.0", id: 1, method: "eth_chainId", params: [] });
const table = await penstock.exportUsage();
let refused: unknown;
try {
  await penstock.createKey({ name: "too much", mode: "live", scopes: ["gas:manage"] });
} catch (error) {
  if (!(error instanceof PenstockError)) throw error;
  refused = [error.status, error.code, error.reason, error.param, error.requestId !== ""];
}
const revoked = await penstock.revokeKey(made.id);
await penstock.listChains();
console.log(JSON.stringify([read.note, changed.note, call.result, table.split(/\\r?\\n/)[0], refused, revoked.revoked]));
"""


@pytest.mark.parametrize("language", LANGUAGES)
async def test_client_manages_keys_and_makes_calls(service: Service, written: Path, language: str) -> None:
    account = await service.new_account("growth")
    scopes = [word for each in ("keys:manage", "usage:read", "rpc:read") for word in ("--scope", each)]
    key = (await service.new_key(account["id"], "--mode", "live", *scopes))["key"]
    found = await asyncio.to_thread(run, written, language, {"URL": f"http://127.0.0.1:{service.port}", "KEY": key})
    note, changed, chain, head, refused, revoked = found
    assert (note, changed, revoked) == ("ü/?", "changed", True)
    assert chain.startswith("0x")
    assert "requests" in head
    assert refused == [403, "forbidden", "scope", "scopes", True]


def run(room: Path, language: str, environ: dict[str, str]) -> Any:
    text, name = (PYTHON, "uses_it.py") if language == "python" else (TYPESCRIPT, "uses_it.mts")
    (room / name).write_text(text)
    words = [sys.executable, "-W", "error", name]
    if language == "typescript":
        words = [str(node_binary()), "--experimental-strip-types", "--no-warnings", name]
    whole = {**os.environ, **ENVIRONMENT, **environ}
    done = subprocess.run(words, cwd=room, env=whole, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_makefile_writes_them_to_dist() -> None:
    assert "-m proxy clients --directory dist/clients" in (ROOT / "Makefile").read_text()
