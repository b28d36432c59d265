"""The hot path as machine code, where it was compiled: the same sources, translated by mypyc.

`python -m proxy compile` puts extension modules into the environment, and whoever imports this package then finds those in
the place of their sources. They stand under a mark, a digest of every source and of the interpreter: after any change the
sources run again, until they are compiled anew. Nothing depends on it but the time that a call takes.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from glob import glob
from hashlib import blake2b
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

# What a call comes through. A module that shares classes with another is best compiled with it: across the border every
# attribute is looked up by its name.
MODULES = (
    "proxy.core.access",
    "proxy.core.limits",
    "proxy.core.routing",
    "proxy.core.usage",
    "proxy.services.rpc.dispatcher",
    "proxy.services.rpc.flights",
    "proxy.services.rpc.forwarder",
    "proxy.services.rpc.method_policy",
    "proxy.services.rpc.network_state",
    "proxy.services.rpc.networks",
    "proxy.store.windows",
    "proxy.web.front.front_connection",
    "proxy.web.front.front_context",
    "proxy.web.front.reply_writer",
    "proxy.web.front.request_heads",
    "proxy.web.front.request_reader",
    "proxy.wire.http1",
    "proxy.wire.http_connection",
    "proxy.wire.http_upstream",
    "proxy.wire.websocket_upstream",
    "proxy.wire.write_buffer",
    "proxy.wire.upstream",
)
# Set to anything: the sources run, compiled or not.
SOURCE_ONLY = "PENSTOCK_SOURCE"
SUFFIX = EXTENSION_SUFFIXES[0]
MARK_BYTES = 12
ROOT = Path(__file__).resolve().parent


class Finder(MetaPathFinder):
    """Finds modules in a directory of extension modules that carry their whole names."""

    def __init__(self, directory: Path) -> None:
        found = [file for file in directory.glob(f"*{SUFFIX}") if file.stat().st_size]
        self.files = {file.name.removesuffix(SUFFIX): file for file in found}

    def __repr__(self) -> str:
        return f"<Finder {len(self.files)} modules>"

    def is_whole(self) -> bool:
        """Whether every module is there, and the library that they share."""
        return self.files.keys() > set(MODULES)

    def load(self) -> None:
        """The library that the modules share, of which they are only the names: ImportError if it is not for this machine."""
        for library in self.files.keys() - set(MODULES):
            import_module(library)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return spec_from_file_location(fullname, file) if file else None


def place() -> Path:
    """Where the compiled form of these very sources is, or would be."""
    mark = blake2b(SUFFIX.encode(), digest_size=MARK_BYTES)
    for source in sorted(glob("**/*.py", root_dir=ROOT, recursive=True)):
        with open(f"{ROOT}/{source}", "rb") as file:
            mark.update(b"\0%b\0%b" % (os.fsencode(source), file.read()))
    return shelf() / mark.hexdigest()


def shelf() -> Path:
    """Where all compiled forms are, of these sources and of others."""
    return Path(sysconfig.get_path("platlib"), "penstock_compiled")


def use() -> None:
    """From here on, import what is compiled, if all of it is there."""
    if SOURCE_ONLY in os.environ or not shelf().is_dir():
        return
    finder = Finder(place())
    if not finder.is_whole():
        return
    sys.meta_path.insert(0, finder)
    try:
        finder.load()
    except ImportError:
        sys.meta_path.remove(finder)


def in_use() -> bool:
    return any(isinstance(finder, Finder) for finder in sys.meta_path)
