"""Runs the code on a page of the guide, as a reader would who pastes one block after the other into a terminal.

    ```bash                       run in the page's terminal
    ```python, ```js, ```ts       run as a program
    ```toml title="penstock.toml" written to a file of this name; code too, and a later block runs it
    <!-- not run: the reason -->  on the line before a block: it is left out
    <!-- needs: program -->       the same if this program is not installed

The page's addresses and ports are replaced by those of the service under test.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.dev.npm_packages import node_binary
from tests.client_scripts import ENVIRONMENT, SCRIPTS
from tests.service import ROOT

PAGES = ROOT / "docs"
# Runs on a host of its own, as root: tests/flows/test_host.py.
HOST_PAGE = PAGES / "host.md"
# Directories of the files that pages include, as in mkdocs.yml.
INCLUDED = (ROOT / "schemas" / "receivers", ROOT / "config")
MODULES = SCRIPTS / "node_modules"
HARDHAT = ROOT / "config" / "devnet" / "node_modules" / "hardhat"
# Languages that run. Blocks in any other are data or output.
PROGRAMS = {"python": "python3 -W error {file}", "js": "node {file}", "ts": "node --experimental-strip-types {file}"}
SUFFIXES = {"python": ".py", "js": ".mjs", "ts": ".mts"}
CODE = {*PROGRAMS, "bash", "go", "sh", "shell", "console", "javascript", "typescript"}
_BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?:not run: (?P<reason>[^\n]+?)|needs: (?P<program>\w+)) -->\n)?"
    r'^(?P<indent>[ ]*)```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?[^\n]*\n(?P<text>.*?)\n(?P=indent)```$',
    re.DOTALL | re.MULTILINE,
)
_INCLUDED = re.compile(r'^--8<-- "(?P<name>[^"]+)"$', re.MULTILINE)
# An HTTP error fails the page, unless the reader is meant to see it (-i).
PROLOGUE = """
set -euo pipefail
curl() { case " $* " in *" -i "*) command curl "$@";; *) command curl --fail-with-body "$@";; esac; }
set -x
"""


@dataclass(frozen=True)
class PageBlock:
    language: str
    title: str
    text: str
    # The reason why it does not run, or empty.
    reason: str

    def script(self, index: int) -> str:
        """The shell commands that run the block or write its file."""
        if self.title:
            return _written(self.title, self.text)
        if self.language == "bash":
            return self.text
        if self.language in PROGRAMS:
            file = f"block{index}{SUFFIXES[self.language]}"
            return _written(file, self.text) + PROGRAMS[self.language].format(file=file)
        return ""


def blocks_of(page: Path) -> list[PageBlock]:
    return blocks_in(page.read_text("utf-8"))


def blocks_in(page: str) -> list[PageBlock]:
    found = []
    for match in _BLOCK.finditer(page):
        text = textwrap.dedent(match["text"])
        assert "--8" not in text or _INCLUDED.search(text), f"a broken inclusion: {text[:60]}"
        text = _INCLUDED.sub(lambda name: _included(name["name"]), text)
        reason = match["reason"] or (match["program"] and _lack_of(match["program"])) or ""
        found.append(PageBlock(match["language"], match["title"] or "", text, reason))
    return found


def _included(name: str) -> str:
    return next(directory / name for directory in INCLUDED if (directory / name).exists()).read_text("utf-8")


def _lack_of(program: str) -> str:
    return "" if installed(program) else f"{program} is not installed"


def installed(program: str) -> str | None:
    """The path of a program: of npm's packages, or of the machine."""
    return next(map(str, MODULES.glob(f"@foundry-rs/*/bin/{program}")), None) or shutil.which(program)


def run_page(page: Path, room: Path, *, environ: Mapping[str, str], replace: Mapping[str, str], within_s: float) -> str:
    """Run the blocks of a page in a new directory; return the output. Raises if one of them fails."""
    _new_project(room)
    port = free_port()
    script = "\n".join(block.script(index) for index, block in enumerate(blocks_of(page)) if not block.reason)
    for name, value in {**replace, "127.0.0.1:3000": f"127.0.0.1:{port}"}.items():
        script = script.replace(name, value)
    whole = {
        **ENVIRONMENT,
        **environ,
        "PATH": f"{_tools(room)}:{os.environ['PATH']}",
        "PORT": str(port),
        "HOME": str(room),
    }
    process = subprocess.Popen(
        ["bash", "-c", PROLOGUE + script],
        cwd=room,
        env=whole,
        stdin=subprocess.DEVNULL,
        stdout=(log := (room / "output.log").open("w+b")),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(within_s)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        _end_group(process)
    log.seek(0)
    output = log.read().decode(errors="replace")
    log.close()
    written = "".join(f"\n{file.name}:\n{file.read_text()[-2000:]}" for file in room.glob("*.txt"))
    assert code == 0, f"{page.name} ended with {code}:\n{output[-6000:]}{written}"
    return output


def _new_project(room: Path) -> None:
    """A directory of a reader who has installed the libraries, and has the checkout's files for deployment."""
    (bin_ := room / "node_modules" / ".bin").mkdir(parents=True)
    for package in (*MODULES.iterdir(), HARDHAT):
        if not package.name.startswith("."):
            (room / "node_modules" / package.name).symlink_to(package)
    (bin_ / "hardhat").symlink_to(HARDHAT.parent / ".bin" / "hardhat")
    (room / "deploy").symlink_to(ROOT / "deploy")
    (room / "package.json").write_text('{"type": "module"}')


def _written(file: str, text: str) -> str:
    return f"cat > {file} <<'END_OF_BLOCK'\n{text}\nEND_OF_BLOCK\n"


def _tools(room: Path) -> Path:
    """The programs that the guide names: those of the tests' environment."""
    tools = room / "bin"
    tools.mkdir()
    for name, line in {
        "python3": f'exec "{sys.executable}" "$@"',
        # The oldest Node here, so that programs need none newer than a reader has; another for types and for Hardhat.
        "node": f'case "$*" in *strip*|*.mts*|*hardhat*) exec "{node_binary()}" "$@";; *) exec "{_oldest_node()}" "$@";; esac',
        # An installed package has its bytecode. Without it, each command would compile hundreds of modules.
        "penstock": f'unset PYTHONDONTWRITEBYTECODE; PYTHONPATH="{ROOT}" exec "{sys.executable}" -m proxy "$@"',
        "cast": f'exec "{installed("cast")}" "$@"',
        "kubernetes-validate": f'exec "{sys.executable}" -m kubernetes_validate "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    return tools


def _oldest_node() -> str:
    """The machine's own Node, unless it is newer than that of the packages."""
    found = [path for path in (shutil.which("node"), str(node_binary())) if path is not None]
    return min(found, key=_node_version)


def _node_version(path: str) -> list[int]:
    shown = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    return [int(part) for part in shown.strip().removeprefix("v").split(".")]


def free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, which could take it before it is used."""
    for port in random.sample(range(20_000, 32_000), 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no port is free")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
