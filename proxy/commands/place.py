"""Where a command finds its settings: a file, the environment, or the running development service."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from proxy import settings
from proxy.errors import StartError
from proxy.settings import Settings
from proxy.store.keys import KeyStore
from proxy.store.pool import Pool

DATA = Path(".penstock")
RUNNING = "running.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings beside the defaults and the environment")
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="the development service's directory")


def load(args: argparse.Namespace) -> Settings:
    """The effective settings; without a file or DATABASE_URL, those of the development service that runs here."""
    environ = settings.environment()
    if args.config is None and "DATABASE_URL" not in environ and "PENSTOCK_DATABASE__URL" not in environ:
        return settings.load(environ=environ, overrides=_running(args.data))
    return settings.load(args.config, environ=environ)


def _running(data: Path) -> dict[str, Any]:
    try:
        return dict(orjson.loads((data / RUNNING).read_bytes()))
    except (OSError, orjson.JSONDecodeError):
        raise StartError(
            ["no database: start `make run` (another directory: --data), give --config FILE or set DATABASE_URL"]
        ) from None


@asynccontextmanager
async def key_store(args: argparse.Namespace) -> AsyncIterator[KeyStore]:
    found = load(args)
    pool = Pool(found.database.url, size=2, acquire_timeout_s=5.0, application="penstock-cli")
    await pool.open()
    try:
        yield KeyStore(pool, pepper=found.keys.pepper, plans=tuple(settings.load_tables().plans))
    finally:
        await pool.close()
