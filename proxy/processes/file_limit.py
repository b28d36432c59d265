"""The operating system's limit on open files, which bounds the connections of each worker.

The limit applies to each process, and children inherit it. A connection beyond it is closed without a reply, so the limit is
raised as far as allowed before the workers start. If it is still too low for `server.max_connections`, that setting is lowered:
connections above it then get a 503.
"""

from __future__ import annotations

import resource

from proxy.errors import StartError
from proxy.settings import Settings, from_tree

# Files that a worker opens besides connections to clients, upstreams and Postgres: modules, logs, metrics, shared memory, the
# event loop, Redis, fetched metadata, and a few connections that are being refused.
OTHER_FILES = 128


def raise_limit() -> int:
    """Raise the limit of this process to its hard limit and return what applies now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # A hard limit above the kernel's own maximum.
        return soft
    return hard


def reserved_files(settings: Settings) -> int:
    """The files that a worker needs besides its client connections."""
    upstreams = sum(each.connections for each in settings.upstreams)
    bundlers = sum(each.connections for each in settings.bundlers)
    databases = 1 + len(settings.databases)
    return OTHER_FILES + upstreams + bundlers + databases * settings.database.pool_size + 1


def fitted(settings: Settings, limit: int) -> Settings:
    """The settings with as many client connections as the limit allows; raise StartError if it allows none."""
    wanted, reserved = settings.server.max_connections, reserved_files(settings)
    if limit == resource.RLIM_INFINITY or wanted + reserved <= limit:
        return settings
    if limit <= reserved:
        raise StartError(
            [
                f"server.max_connections: a worker needs {reserved} files for its upstreams and the database alone, and the "
                f"limit on open files is {limit}: raise it to {wanted + reserved} (`ulimit -n`, or LimitNOFILE in systemd)"
            ]
        )
    return from_tree({**settings.tree, "server": {**settings.tree["server"], "max_connections": limit - reserved}})
