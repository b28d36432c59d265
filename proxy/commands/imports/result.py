"""The result of an import: settings of Penstock, and a row for each setting of the other program."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal
from urllib.parse import urlsplit

from proxy.chains.registry import Network
from proxy.commands.imports.documents import Entry, unset_variable
from proxy.core.node_operators import operator_of
from proxy.core.routing_rules import fits
from proxy.settings import Provider, Tables, has_provider

State = Literal["mapped", "differs", "no equal"]
COLUMNS = ("line", "theirs", "state", "ours")
BUILT_IN = "built in: needs no settings"
# Methods that `method_rates` of an upstream can name, and its highest limit.
_RATED = re.compile(r"[A-Za-z][A-Za-z0-9_]*[*]?")
_HIGHEST_RATE = 1e6


def _quoted(text: str) -> str:
    """A word of a shell command, in one line."""
    return shlex.quote(" ".join(text.split()))


@dataclass(frozen=True, slots=True)
class ImportRow:
    line: int
    theirs: str
    state: State
    ours: str


@dataclass(slots=True)
class ImportResult:
    """Settings by section, and lists such as `upstreams`. `commands`: what to run afterwards, such as for API keys."""

    tables: Tables
    providers: Mapping[str, Provider]
    rows: list[ImportRow] = field(default_factory=list)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    upstreams: list[dict[str, Any]] = field(default_factory=list)
    verify: list[dict[str, Any]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    # Rows

    def mapped(self, entry: Entry | None, ours: str) -> None:
        self._add(entry, "mapped", ours)

    def differs(self, entry: Entry | None, ours: str) -> None:
        self._add(entry, "differs", ours)

    def no_equal(self, entry: Entry | None, ours: str = "") -> None:
        self._add(entry, "no equal", ours)

    def _add(self, entry: Entry | None, state: State, ours: str) -> None:
        if entry is not None:
            self.rows.append(ImportRow(entry.read().line, entry.path, state, ours))

    def finish(self, document: Entry) -> None:
        """Report everything that nothing has read."""
        for entry in document.unread():
            self.no_equal(entry)
        # A rule that several upstreams share has one row.
        self.rows = sorted(dict.fromkeys(self.rows), key=lambda row: row.line)

    # Settings

    def put(self, section: str, name: str, value: Any, entry: Entry | None) -> None:
        """Set a value. `section` may have a dot: server.tls."""
        if entry is None:
            return
        self.sections.setdefault(section, {})[name] = value
        shown = "…" if name.endswith("_url") else json.dumps(value)
        self.mapped(entry, f"{section}.{name} = {shown}")

    def put_most(self, section: str, name: str, value: float, entry: Entry | None) -> None:
        """Set the largest value of several: there is one setting for all networks."""
        if entry is None:
            return
        table = self.sections.setdefault(section, {})
        table[name] = max(value, table.get(name, value))
        self.differs(entry, f"{section}.{name} = {table[name]:g}, for all networks")

    def log_level(self, entry: Entry | None) -> None:
        if entry is not None:
            levels = {"trace": "debug", "debug": "debug", "info": "info", "warn": "warning", "warning": "warning"}
            self.put("log", "level", levels.get(entry.text.lower(), "error"), entry)

    def valkey(self, name: str, entry: Entry | None) -> None:
        """A Redis address. It has no scheme in some files."""
        if entry is not None:
            url = entry.text if "://" in entry.text else f"redis://{entry.text}"
            self.put("valkey", name, url, entry)

    # Upstreams

    def add_upstream(
        self, entry: Entry, network: Network | None, url: str, *, only: Iterable[Network] = (), **settings: Any
    ) -> None:
        """Add an upstream, or report why not. `only`: the networks to take from a provider if `network` is None; if it serves
        none of these, all are taken. `settings` that are None or empty are left out."""
        scheme = urlsplit(url).scheme
        if has_provider(url) and scheme not in self.providers:
            known = ", ".join(self.providers)
            self.no_equal(entry, f"{scheme}:// is not known: name its URL, or use one of {known}")
            return
        if scheme not in ("http", "https", "ws", "wss") and not has_provider(url):
            self.no_equal(entry, "not an http, https, ws or wss URL" if url else "has no URL")
            return
        if network is None and not has_provider(url):
            self.no_equal(entry, "its network is unknown: `penstock doctor URL` finds it and writes the block")
            return
        given = {name: value for name, value in settings.items() if value not in (None, "", [], {}, ())}
        block = {**({} if network is None else {"network": network.id}), "url": url, **given}
        block["name"] = self._free_name(block.get("network", "*"), str(given.get("name", "")))
        if not block["name"]:
            del block["name"]
        taken = [each.id for each in only if network is None and each.id in self.providers[scheme].networks]
        if taken:
            block["network"] = taken
        self.upstreams.append(block)
        where = network.id if network is not None else ", ".join(taken) or "all networks of the provider"
        self.mapped(entry, f"[[upstreams]] {where} {block.get('name', '')}".rstrip())
        if variable := unset_variable(url):
            self.differs(entry, f"${variable} is not set: write its value into the URL")

    def _free_name(self, network: str, given: str) -> str:
        name = re.sub(r"[^a-z0-9._-]+", "-", given.lower()).strip("-._")
        name = (name if name[:1].isalpha() or not name else f"u-{name}")[:36]
        taken = {each.get("name") for each in self.upstreams if network in (each.get("network", "*"), "*")}
        free = (f"{name}-{number}" for number in range(2, 1000))
        return next(free_name for free_name in (name, *free) if not free_name or free_name not in taken)

    def methods_like(self, patterns: Iterable[str], network: Network | None) -> list[str]:
        """The methods that match the patterns. A provider's networks are EVM networks."""
        known = self.tables.methods["evm" if network is None else network.family]
        methods: list[str] = []
        for pattern in patterns:
            methods += [name for name in known if fnmatchcase(name, pattern)] if "*" in pattern else [pattern]
        return list(dict.fromkeys(methods))

    def method_rates(
        self, rule: Entry, patterns: Iterable[str], rate: float, network: Network | None
    ) -> dict[str, float]:
        """The limit of a rule for each of these methods, and its row. A pattern may end in `*`."""
        known, wanted = self.tables.methods["evm" if network is None else network.family], list(patterns)
        rates = {each: rate for each in wanted if _RATED.fullmatch(each) and any(fits((each,), name) for name in known)}
        if not rates or len(rates) < len(wanted) or not 0 < rate <= _HIGHEST_RATE:
            self.no_equal(rule, f"{rate:g} calls per second of {', '.join(wanted) or 'no method'}")
            return {}
        shown = f"method_rates of {', '.join(rates)}: {rate:g}; each upstream has its own count"
        if len(rates) == 1:
            self.mapped(rule, shown)
        else:
            self.differs(rule, f"{shown}, and each of the methods")
        return rates

    def add_quorum(self, entry: Entry, network: Network, methods: list[str], agree: int, of: int) -> None:
        """Add verified replies, unless no set of upstreams could fulfil it."""
        operators = {
            each.get("operator") or operator_of(urlsplit(each["url"]).hostname or "")
            for each in self.upstreams
            if each.get("network") == network.id and not has_provider(each["url"])
        }
        known = self.tables.methods[network.family]
        reads = [name for name in methods if name in known and known[name].kind == "read"]
        agree, of = max(2, agree), max(2, of, agree)
        if not reads:
            self.no_equal(entry, "no method of it is a read that can be verified")
        elif of > 9 or len(operators) < agree:
            self.no_equal(
                entry, f"quorum {agree}/{of} needs upstreams of {agree} operators, and there are {len(operators)}"
            )
        else:
            self.verify.append({"network": network.id, "methods": reads, "by": f"quorum {agree}/{of}"})
            self.differs(
                entry, f"[[verify]] quorum {agree}/{of} on {network.id}; votes count per operator, disputes are errors"
            )

    def add_key(self, entry: Entry, name: str, options: Iterable[tuple[str, str]] = ()) -> None:
        """A key to create. All three gateways take keys in URLs, so it is allowed there."""
        given = [word for option, value in (("--name", name), *options) for word in (option, _quoted(value))]
        self.commands.append(" ".join(("penstock keys create --account ACCOUNT", *given, "--allow-in-url")))
        self.differs(entry, "Penstock makes keys itself: run the command below, and give clients the new key")
