"""Programs that some tests run and Python packages do not include: HAProxy, litecoind, pgbouncer, promtool and redis-server.

    python -m tests.programs    # installs the missing ones, as root on Debian; `make test` starts with it

Without them, their tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import pytest

from bench import debian_packages

# Program and package. Prometheus itself is not run; its package contains promtool.
PACKAGES: Mapping[str, str] = {
    "haproxy": "haproxy",
    "litecoind": "litecoind",
    "pgbouncer": "pgbouncer",
    "promtool": "prometheus",
    "redis-server": "redis-server",
}


def find(program: str) -> str | None:
    # Debian has some of them in a directory for administrators.
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


def needs(program: str) -> pytest.MarkDecorator:
    """Skips a test without the program."""
    return pytest.mark.skipif(find(program) is None, reason=f"{program} is not installed")


def main() -> None:
    missing = sorted({package for program, package in PACKAGES.items() if find(program) is None})
    if not missing:
        return
    print(f"installing Debian's {', '.join(missing)} ...", flush=True)
    if fault := debian_packages.install(*missing):
        print(f"not installed ({fault}); their tests are skipped", flush=True)


if __name__ == "__main__":
    main()
