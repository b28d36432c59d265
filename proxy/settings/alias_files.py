"""Loads the aliases that are switched on from `config/aliases/*.toml`: URLs of other services that mean networks here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from proxy.core.url_aliases import NetworkFinder, UrlAlias, UrlAliases, UrlPattern, clashes
from proxy.data_files import CONFIG
from proxy.errors import StartError
from proxy.settings.given_files import read_text
from proxy.settings.providers import Provider, load_providers
from proxy.settings.tables import DataDirectories, Tables
from proxy.settings.toml_files import checked, line_of, with_line

DIRECTORY = "aliases"
# The first segment of the API's own paths.
_OWN = "v1"


def load_aliases(
    switches: Mapping[str, Any], tables: Tables, *, own: str = "", settings_file: Path | None = None
) -> UrlAliases:
    """The aliases that are switched on, or StartError with all faults. `own`: the operator's directory, if there is one.
    `settings_file` has the switches."""
    files = {path.stem: path for path in DataDirectories(CONFIG, Path(own) if own else None).all(DIRECTORY, "*.toml")}
    faults = [_no_alias(name, files, settings_file) for name in switches if name not in files]
    wanted = [files[name] for name, is_on in switches.items() if is_on and name in files]
    providers = load_providers(own) if wanted else {}
    read = [_AliasFile(path, data, tables, providers) for path in wanted if (data := checked("alias", path, faults))]
    faults += [with_line(each.path, fault) for each in read for fault in each.faults()]
    aliases = [] if faults else [each.alias() for each in read]
    faults += clashes(aliases)
    if faults:
        raise StartError(faults)
    return UrlAliases(aliases)


def _no_alias(name: str, known: Mapping[str, Path], settings_file: Path | None) -> str:
    near = get_close_matches(name, known, n=1)
    words = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    fault = f"{DIRECTORY}.{name}: there is no alias {name}; {words}"
    return fault if settings_file is None else with_line(settings_file, fault)


class _AliasFile:
    """One file, which the schema has accepted."""

    def __init__(self, path: Path, data: Mapping[str, Any], tables: Tables, providers: Mapping[str, Provider]) -> None:
        self.path = path
        self._data = data
        self._tables = tables
        self._providers = providers

    def faults(self) -> Iterator[str]:
        provider = self._data.get("provider")
        if provider is not None and provider not in self._providers:
            yield f"provider: there is no provider {provider}; use one of {', '.join(self._providers)}"
        for index, pattern in enumerate(self._patterns()):
            yield from (f"patterns.{index}.path: {fault}" for fault in pattern.faults())
            if pattern.path[0] == _OWN:
                yield f"patterns.{index}.path: must not start with /{_OWN}, which is the API's own"
        for name, network in self._data.get("networks", {}).items():
            if self._tables.find_network(network) is None:
                yield f"networks.{name}: there is no network {network}"

    def _patterns(self) -> tuple[UrlPattern, ...]:
        text = read_text(self.path)
        return tuple(
            UrlPattern.of(
                each["path"],
                host=each.get("host", ""),
                to=each.get("to", ""),
                place=f"{self.path.name} line {line_of(text, f'patterns.{index}.path')}",
            )
            for index, each in enumerate(self._data["patterns"])
        )

    def alias(self) -> UrlAlias:
        names = self._names()
        return UrlAlias(self.path.stem, self._patterns(), self._finder(names), names)

    def _names(self) -> dict[str, str]:
        provider = self._providers.get(self._data.get("provider", ""))
        named = {} if provider is None else {name: network for network, name in provider.networks.items() if name}
        return {**named, **self._data.get("networks", {})}

    def _finder(self, names: Mapping[str, str]) -> NetworkFinder:
        has_words, chains = self._data.get("words", False), self._tables.chains

        def find(name: str) -> str | None:
            if name in names or not has_words:
                return names.get(name)
            network = chains.find_word(name, live=True)
            return None if network is None else network.id

        return find
