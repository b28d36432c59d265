"""Importing the hot path as machine code, if it was compiled.

`python -m proxy compile` translates these modules with mypyc and installs extension modules into the environment, which are
then imported in place of the sources. Wheels for one platform contain them. Their directory is named after a digest of every
source and of the interpreter: after any change the sources run again until they are compiled again. Only the duration of a call
depends on it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from glob import glob
from hashlib import blake2b
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

# The modules on the path of a call. Modules that share classes are best compiled together: between compiled and plain modules
# every attribute is looked up by name.
MODULES = (
    "proxy.core.access",
    "proxy.core.batch_envelopes",
    "proxy.core.bounded",
    "proxy.core.caching",
    "proxy.core.concurrency",
    "proxy.core.encodings",
    "proxy.core.latency_histogram",
    "proxy.core.limits",
    "proxy.core.pace",
    "proxy.core.retry_budget",
    "proxy.core.routing",
    "proxy.core.trials",
    "proxy.core.upstream_health",
    "proxy.core.usage",
    "proxy.memory_budget",
    "proxy.services.request_recorder",
    "proxy.services.rpc.batch_admission",
    "proxy.services.rpc.batches",
    "proxy.services.rpc.call_checks",
    "proxy.services.rpc.dispatcher",
    "proxy.services.rpc.flights",
    "proxy.services.rpc.forwarder",
    "proxy.services.rpc.held_body",
    "proxy.services.rpc.method_policy",
    "proxy.services.rpc.network_state",
    "proxy.services.rpc.networks",
    "proxy.services.rpc.probe",
    "proxy.services.rpc.rpc_service",
    "proxy.services.rpc.shadow",
    "proxy.services.rpc.upstream_batch",
    "proxy.store.shared_memory.bucket_table",
    "proxy.store.shared_memory.lease_records",
    "proxy.store.shared_memory.leased_buckets",
    "proxy.store.shared_memory.name_table",
    "proxy.store.shared_memory.rate_buckets",
    "proxy.web.call_accounting",
    "proxy.web.front.front_connection",
    "proxy.web.front.front_context",
    "proxy.web.front.record_draft",
    "proxy.web.front.record_starts",
    "proxy.web.front.reply_lines",
    "proxy.web.front.reply_stream",
    "proxy.web.front.reply_writer",
    "proxy.web.front.request_headers",
    "proxy.web.front.request_reader",
    "proxy.web.front.rest_requests",
    "proxy.web.front.short_call",
    "proxy.wire.call_queue",
    "proxy.wire.http1",
    "proxy.wire.http_connection",
    "proxy.wire.http_upstream",
    "proxy.wire.ok_upstream",
    "proxy.wire.rest_upstream",
    "proxy.wire.signing_upstream",
    "proxy.wire.sliced_reading",
    "proxy.wire.tls_transport",
    "proxy.wire.waiting_calls",
    "proxy.wire.websocket_upstream",
    "proxy.wire.write_buffer",
    "proxy.wire.upstream",
)
# If this is set, the sources run, compiled or not.
SOURCE_ONLY = "PENSTOCK_SOURCE"
SUFFIX = EXTENSION_SUFFIXES[0]
DIGEST_BYTES = 12
DIRECTORY = "penstock_compiled"
ROOT = Path(__file__).resolve().parent


class Finder:
    """Finds modules in a directory of extension modules that are named by their full dotted names.

    Its base class is left out: importing that takes as long as the rest of `penstock --help`.
    """

    def __init__(self, directory: Path) -> None:
        files = [file for file in directory.glob(f"*{SUFFIX}") if file.stat().st_size]
        self.files = {file.name.removesuffix(SUFFIX): file for file in files}

    def __repr__(self) -> str:
        return f"<Finder {len(self.files)} modules>"

    def is_whole(self) -> bool:
        """Whether all modules exist, and the library that they share."""
        return self.files.keys() > set(MODULES)

    def load(self) -> None:
        """Load the library that contains the code of all modules. Raises ImportError if it was built for another machine."""
        for library in self.files.keys() - set(MODULES):
            import_module(library)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return spec_from_file_location(fullname, file) if file else None


def directory() -> Path:
    """The directory for the compiled form of the current sources."""
    digest = blake2b(SUFFIX.encode(), digest_size=DIGEST_BYTES)
    for source in sorted(glob("**/*.py", root_dir=ROOT, recursive=True)):
        with open(f"{ROOT}/{source}", "rb") as file:
            digest.update(b"\0%b\0%b" % (os.fsencode(source), file.read()))
    return root() / digest.hexdigest()


def root() -> Path:
    """The directory of all compiled forms, of these sources and of others. A platform's wheel has one beside the package."""
    beside = ROOT.parent / DIRECTORY
    return beside if beside.is_dir() else Path(sysconfig.get_path("platlib"), DIRECTORY)


def use() -> None:
    """Import compiled modules from now on, if all of them exist."""
    if SOURCE_ONLY in os.environ or not root().is_dir():
        return
    finder = Finder(directory())
    if not finder.is_whole():
        return
    sys.meta_path.insert(0, finder)
    try:
        finder.load()
    except ImportError:
        sys.meta_path.remove(finder)


def in_use() -> bool:
    return any(isinstance(finder, Finder) for finder in sys.meta_path)
