"""Accounts and keys on the command line: tables, JSON, and one-line errors."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from datetime import datetime
from pathlib import Path

import orjson
import pytest

from proxy.core.access import is_well_formed
from tests.service import ROOT, Service, command, command_here, until


async def test_account_is_created_shown_changed_and_listed(service: Service) -> None:
    made = await service.cli_json(
        "accounts", "create", "--name", "Acme", "--email", "it@acme.example", "--plan", "growth"
    )
    assert made["id"].startswith("acct_")
    assert (made["name"], made["email"], made["plan"]) == ("Acme", "it@acme.example", "growth")
    assert made["requests_per_day"] is None
    assert datetime.fromisoformat(made["created_at"]).tzinfo is not None
    own = ("--requests-per-second", "5", "--units-per-second", "500", "--requests-per-day", "0")
    changed = await service.cli_json("accounts", "set", made["id"], "--name", "Acme 2", "--plan", "enterprise", *own)
    assert (changed["name"], changed["plan"], changed["email"]) == ("Acme 2", "enterprise", "it@acme.example")
    limits = ("requests_per_second", "units_per_second", "requests_per_day")
    assert [changed[name] for name in limits] == [5, 500, 0]
    back = ("--requests-per-second", "-1", "--units-per-second", "-1", "--requests-per-day", "-1")
    inherited = await service.cli_json("accounts", "set", made["id"], *back)
    assert [inherited[name] for name in limits] == [None, None, None]
    shown = await service.cli_json("accounts", "show", made["id"])
    assert shown["used_today"] == 0
    assert made["id"] in [row["id"] for row in await service.cli_json("accounts", "list")]


async def test_account_is_deleted_only_if_confirmed(service: Service) -> None:
    account = (await service.new_account())["id"]
    done = await service.cli("accounts", "delete", account)
    assert done.returncode == 1
    assert "nothing was deleted" in done.stderr
    assert await service.cli_json("accounts", "delete", account, "--yes") == {"id": account, "deleted": True}
    assert (await service.cli_json("accounts", "show", account))["email"] == ""


async def test_minus_one_inherits_on_creation(service: Service) -> None:
    made = await service.new_account("free", "--requests-per-second", "-1", "--requests-per-day", "-1")
    assert made["requests_per_second"] is None
    key = await service.new_key(made["id"], "--units-per-second", "-1")
    assert key["units_per_second"] is None


async def test_key_is_printed_only_once(service: Service) -> None:
    account = await service.new_account()
    made = await service.new_key(account["id"], "--name", "ci", "--mode", "test", "--scope", "rpc:read")
    assert is_well_formed(made["key"])
    assert made["hint"].endswith(made["key"][-4:])
    assert (made["name"], made["mode"], made["scopes"], made["status"]) == ("ci", "test", ["rpc:read"], "active")
    shown = await service.cli_json("keys", "show", made["id"])
    listed = await service.cli_json("keys", "list", "--account", account["id"])
    assert [row["id"] for row in listed] == [made["id"]]
    for data in (shown, listed):
        text = orjson.dumps(data).decode()
        assert made["key"] not in text
        assert "digest" not in text


async def test_default_output_is_a_table(service: Service) -> None:
    account = await service.new_account()
    assert (await service.cli("keys", "list", "--account", account["id"])).stdout == "none\n"
    created = await service.cli("keys", "create", "--account", account["id"])
    assert "it cannot be shown again" in created.stdout
    head, *rows = (await service.cli("keys", "list", "--account", account["id"])).stdout.splitlines()
    assert head.split() == [
        "id", "account_id", "name", "hint", "mode", "status", "scopes", "expires_at", "created_at"
    ]  # fmt: skip
    assert len(rows) == 1
    assert rows[0].split()[3:8] == [rows[0].split()[3], "live", "active", "all", "-"]
    head, *rows = (await service.cli("accounts", "list")).stdout.splitlines()
    assert head.startswith("id")
    assert all(line[head.index("name") - 1] == " " for line in rows)
    shown = (await service.cli("accounts", "show", account["id"])).stdout
    assert dict(line.split(maxsplit=1) for line in shown.splitlines())["email"] == account["email"]


async def test_closed_pipe_is_not_an_error(service: Service) -> None:
    """For example `keys list | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    words = ("keys", "list", "--data", str(service.data))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *words), cwd=ROOT, stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    _, said = await process.communicate()
    assert (process.returncode, said) == (128 + signal.SIGPIPE, b"")


@pytest.fixture(scope="module")
async def some(service: Service) -> tuple[str, str, str]:
    """An account with a key and a revoked key."""
    account = await service.new_account()
    key, gone = [await service.new_key(account["id"]) for _ in range(2)]
    await service.cli_json("keys", "revoke", gone["id"])
    return account["id"], key["id"], gone["id"]


WRONG = {
    "accounts show NOBODY": "NOBODY",
    "accounts set ACCOUNT --plan platinum": "free, growth, enterprise",
    "accounts set ACCOUNT --name=": "name",
    "accounts set ACCOUNT --email nonsense": "nonsense",
    "accounts set ACCOUNT --requests-per-second 0": "requests_per_second",
    "accounts set ACCOUNT --requests-per-day 99999999999999999999": "requests_per_day",
    "accounts create --name x --email nonsense": "nonsense",
    "keys create --account NOBODY": "NOBODY",
    "keys create --account ACCOUNT --scope everything": "rpc:read",
    "keys set GONE --name x": "revoked",
    "keys show NOBODY": "NOBODY",
    "keys rotate GONE": "revoked",
    "keys rotate KEY --overlap-s nan": "overlap",
    "keys enable GONE": "revoked",
    "upstreams rules": "write them as above = { lag_blocks = 5 }",
}


@pytest.mark.parametrize("words", WRONG)
async def test_errors_are_one_line(service: Service, some: tuple[str, str, str], words: str) -> None:
    names = dict(zip(("ACCOUNT", "KEY", "GONE"), some, strict=True))
    done = await service.cli(*(names.get(word, word) for word in words.split()))
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("penstock: ")
    assert WRONG[words] in done.stderr


async def test_cost_without_a_price_list_says_so(service: Service) -> None:
    done = await service.cli("cost")
    assert (done.returncode, done.stderr) == (0, "")
    assert 'cost = "alchemy"' in done.stdout


async def test_one_unit_is_explained_in_the_singular(service: Service) -> None:
    made = await service.rpc("eth_nope")
    assert made.status == 200

    async def explained() -> str:
        return (await service.cli("explain", made.headers["X-Request-Id"])).stdout

    assert "charged:     1 unit\n" in await until(explained)


@pytest.mark.parametrize(
    "words",
    ["accounts", "accounts create", "keys create", "keys create --account x --mode beta", "keys show"],
)
async def test_unknown_command_prints_the_usage(words: str) -> None:
    done = await asyncio.to_thread(command_here, *words.split())
    assert done.returncode == 2
    assert "usage: python -m proxy" in done.stderr


async def test_help_and_version_are_printed() -> None:
    helped = await asyncio.to_thread(command, "--help")
    assert helped.returncode == 0
    for name in ("dev", "serve", "check", "migrate", "accounts", "keys"):
        assert name in helped.stdout
    versioned = await asyncio.to_thread(command, "--version")
    assert versioned.stdout.startswith("penstock ")


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["kyes"]])
def test_overview_loads_none_of_the_service(words: list[str]) -> None:
    """Anything else would make the first command that people try feel slow: aiohttp alone takes 100 ms."""
    program = (
        "import sys; before = {*sys.modules}; from proxy.__main__ import main\n"
        f"try: main({words})\nexcept SystemExit: pass\n"
        "print('\\n' + ' '.join({*sys.modules} - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "proxy.errors" in loaded
    assert {name for name in loaded if name.startswith("proxy.")} <= {
        "proxy.__main__",
        "proxy.compiled",
        "proxy.errors",
    }
    roots = {name.partition(".")[0] for name in loaded if not name.startswith("_sysconfigdata")}
    roots -= {name for name in roots if name.endswith("__mypyc")}  # compiled modules of the same package
    assert roots <= {*sys.stdlib_module_names, "proxy"}
    assert not {"asyncio", "ssl", "http", "email", "logging", "subprocess", "inspect"} & {*loaded}


async def test_command_without_a_running_service_says_what_to_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = await asyncio.to_thread(command_here, "keys", "list", "--data", str(tmp_path_factory.mktemp("nothing")))
    assert done.returncode == 2
    assert "make run" in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_data_directory_is_read_from_the_environment(service: Service) -> None:
    done = await asyncio.to_thread(command, "accounts", "list", env={"PENSTOCK_DATA": str(service.data)})
    assert done.returncode == 0, done.stderr
    assert "free@example.com" in done.stdout


# Upstreams


async def test_upstream_is_listed_cordoned_and_used_again(service: Service) -> None:
    label = "ethereum/sepolia#1"

    async def states() -> dict[str, str]:
        return {row["label"]: row["state"] for row in await service.cli_json("upstreams", "list")}

    async def is_in(state: str) -> bool:
        return (await states()).get(label) == state

    await until(lambda: is_in("up"))
    await service.cli_json("upstreams", "cordon", label, "--last", "--reason", "maintenance")
    try:
        await until(lambda: is_in("cordoned"))
        (row,) = [row for row in await service.cli_json("upstreams", "list") if row["label"] == label]
        assert row["cordon"] == "maintenance"
    finally:
        await service.cli_json("upstreams", "uncordon", label)
    await until(lambda: is_in("up"))
    done = await service.cli("upstreams", "uncordon", label)
    assert (done.returncode, done.stderr) == (1, f"penstock: {label} is not cordoned; cordoned are: none\n")
    done = await service.cli("upstreams", "cordon", "nowhere#1")
    assert "no running worker has an upstream nowhere#1; there are: " in done.stderr
    assert label in done.stderr


async def test_upstreams_of_the_development_service_are_tried(service: Service) -> None:
    async def are_useful() -> bool:
        done = await service.cli("upstreams", "test")
        assert done.stderr == ""
        assert "dev/mainnet#1" in done.stdout
        return done.returncode == 0

    await until(are_useful, every_s=0.5)


async def test_top_shows_keys_methods_and_upstreams(service: Service) -> None:
    assert (await service.rpc("eth_chainId")).status == 200

    async def is_shown() -> bool:
        done = await service.cli("top", "--once")
        assert done.returncode == 0, done.stderr
        return all(word in done.stdout for word in ("key_", "eth_chainId", "dev/mainnet#1"))

    await until(is_shown)
    head, first = (await service.cli("top", "--once")).stdout.splitlines()[2:4]
    assert head.split() == ["account", "name", "requests", "errors", "hits", "units", "key"]
    assert not first.startswith(("key_", "-"))


# Shells


def test_bash_completes_commands_options_and_values() -> None:
    script = command_here("completion", "bash").stdout

    def completed(*words: str) -> list[str]:
        line = f'COMP_WORDS=(penstock {" ".join(words)}); COMP_CWORD={len(words)}; _penstock; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("che") == ["check"]
    assert completed("webhooks", "l") == ["listen"]
    assert "--config" in completed("check", "--offline", "--")
    assert completed("webhooks", "trigger", "NEW") == ["NEW_BLOCK"]
    assert completed("work") == []


# A command line for the script, in place of zsh's completion system.
ZSH = """
compdef() {{ }}
{script}
compadd() {{ print -l -- ${{(M)@[2,-1]:#$words[CURRENT]*}} }}
words=({words}) CURRENT=$#words
_penstock
"""


def test_zsh_completes_commands_options_and_values() -> None:
    script = command_here("completion", "zsh").stdout
    assert "    'penstock webhooks' '--help listen trigger'\n" in script
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")

    def completed(*typed: str) -> list[str]:
        words = " ".join(f"'{word}'" for word in ("penstock", *typed))
        line = ZSH.format(script=script, words=words)
        done = subprocess.run(["zsh", "-f", "-c", line], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("che") == ["check"]
    assert completed("webhooks", "l") == ["listen"]
    assert "--config" in completed("check", "--offline", "--")
    assert completed("webhooks", "trigger", "NEW") == ["NEW_BLOCK"]
    assert {"check", "serve"} <= set(completed(""))


def test_fish_gets_the_words_that_follow_each_command() -> None:
    script = command_here("completion", "fish").stdout
    words = dict(re.findall(r"case '([^']+)'\n +string split ' ' -- '([^']*)'", script))
    assert words["penstock completion"].split() == ["--help", "bash", "zsh", "fish"]
    assert {"listen", "trigger"} <= set(words["penstock webhooks"].split())
    assert "NEW_BLOCK" in words["penstock webhooks trigger"].split()
    assert "'penstock webhooks trigger'" in script.rpartition("__penstock_lines ")[2]
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-execute"], input=script, text=True, check=True)


def test_interpreter_without_the_packages_uses_those_of_the_checkout(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    words = (str(tmp_path / "bin" / "python"), "-m", "proxy", "chains", "list")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "dev/mainnet" in done.stdout
