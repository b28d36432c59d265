"""Upstreams in one line: `url = "alchemy://KEY"` stands for an upstream on each of the provider's networks.

`config/providers/*.toml` has the URL template of each provider and its names of networks, so no call is needed. `network` may
be left out (all networks), or be a name, a pattern such as `CHAIN/*`, or a list of them. All other settings of the block apply
to each upstream. `repository:///path` reads URLs of public upstreams from a file (settings/public_upstreams.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from proxy.chains.registry import Network
from proxy.core.credits import CreditTable
from proxy.data_files import CONFIG
from proxy.errors import StartError
from proxy.settings.masking import MASK
from proxy.settings.public_upstreams import REPOSITORY, UnusableList, read_file
from proxy.settings.toml_files import checked

DIRECTORY = "providers"
_PLAIN = frozenset(("http", "https", "ws", "wss"))
_LISTS = ("upstreams", "bundlers")


class NetworkList(msgspec.Struct, frozen=True):
    """The URL and format of a provider's list of networks; `schemas/config/provider.json` describes the members."""

    url: str
    entries: str
    chain_id: str
    name: str
    where: Mapping[str, str | bool | int] = {}
    prefer: str = ""


@dataclass(frozen=True, slots=True)
class Provider:
    """One file. `networks`: the provider's names by ours. `key_per_network`: a key is valid on one network only. `credits`: its
    price list, if that is known. `own_list`: where it lists its networks, if it does."""

    path: Path
    name: str
    title: str
    template: str
    serves: tuple[str, ...]
    networks: Mapping[str, str]
    key_per_network: bool = False
    credits: CreditTable | None = None
    own_list: NetworkList | None = None

    def with_networks(self, networks: Mapping[str, str]) -> Provider:
        return replace(self, networks=networks)

    def url(self, network: str, *, key: str, name: str = "") -> str:
        word = self.networks[network]
        template = self.template if word else self.template.replace("{network}.", "")
        return template.format(network=word, key=quote(key, safe=""), name=name)

    def shown(self, network: str) -> str:
        return self.url(network, key="KEY", name="NAME").replace("KEY", MASK)

    @property
    def form(self) -> str:
        return f"{self.name}://NAME/TOKEN" if "{name}" in self.template else f"{self.name}://KEY"


def load_providers(own: str = "", config: Path = CONFIG) -> dict[str, Provider]:
    """All providers by name. The operator's files replace shipped ones of the same name."""
    files = {path.stem: path for path in sorted((config / DIRECTORY).glob("*.toml"))}
    if own:
        files |= {path.stem: path for path in sorted((Path(own) / DIRECTORY).glob("*.toml"))}
    faults: list[str] = []
    providers = {
        path.stem: _provider(path, data) for path in files.values() if (data := checked("provider", path, faults))
    }
    if faults:
        raise StartError(faults)
    return providers


def _provider(path: Path, data: Mapping[str, Any]) -> Provider:
    serves = tuple(data.get("serves", ("upstreams",)))
    credits_ = msgspec.convert(data["credits"], CreditTable) if "credits" in data else None
    own_list = msgspec.convert(data["list"], NetworkList) if "list" in data else None
    is_per_network = data.get("key_per_network", False)
    named = (path, path.stem, data["title"], data["url"], serves, data["networks"])
    return Provider(*named, key_per_network=is_per_network, credits=credits_, own_list=own_list)


class _Unusable(Exception):
    """A fault of one setting of a block."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(problem)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Makes upstreams of the blocks of one list. `find`: the network of a chain id."""

    list_name: str
    providers: Mapping[str, Provider]
    find: Callable[[str], Network | None]

    def upstreams(self, block: Mapping[str, Any], scheme: str) -> list[dict[str, Any]]:
        """The upstreams that the block stands for, or _Unusable."""
        patterns = _patterns(block.get("network", "*"))
        urls = self._repository(block["url"]) if scheme == REPOSITORY else self._provider_urls(block, scheme)
        rest = {name: value for name, value in block.items() if name not in ("network", "url")}
        upstreams = [
            {"network": network, "url": url, "name": scheme if position == 0 else f"{scheme}-{position + 1}", **rest}
            for network, listed in urls.items()
            if any(fnmatchcase(network, pattern) for pattern in patterns)
            for position, url in enumerate(listed)
        ]
        if not upstreams:
            raise _Unusable("network", f"{scheme} has no network {' or '.join(patterns)}: see chains list --provider")
        return upstreams

    def _provider_urls(self, block: Mapping[str, Any], scheme: str) -> dict[str, list[str]]:
        provider = self.providers.get(scheme)
        if provider is None:
            near = get_close_matches(scheme, (*self.providers, REPOSITORY), n=1)
            known = f"did you mean {near[0]}://?" if near else f"use a URL, or one of {', '.join(self.providers)}"
            raise _Unusable("url", f"there is no provider {scheme}; {known}")
        if self.list_name not in provider.serves:
            raise _Unusable("url", f"{provider.title} is for {' and '.join(f'[[{each}]]' for each in provider.serves)}")
        name, key = _credentials(block["url"], provider)
        if provider.key_per_network and any("*" in each for each in _patterns(block.get("network", "*"))):
            raise _Unusable("network", f"is required: {provider.title} has a key for each network")
        return {network: [provider.url(network, key=key, name=name)] for network in provider.networks}

    def _repository(self, url: str) -> dict[str, list[str]]:
        parts = urlsplit(url)
        if parts.netloc:
            command = f"penstock chains list --provider {url} --refresh --write FILE"
            raise _Unusable("url", f"nothing is fetched at start: run `{command}`, then write repository:///path/FILE")
        try:
            by_id = read_file(Path(parts.path))
        except UnusableList as exc:
            raise _Unusable("url", str(exc)) from None
        pairs = {chain: (self.find(chain), urls) for chain, urls in by_id.items()}
        return {network.id: urls for network, urls in pairs.values() if network is not None}


def _patterns(given: Any) -> Sequence[str]:
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
        raise _Unusable("network", "must be the name of a network, a pattern such as CHAIN/*, or a list of them")
    return patterns


def _credentials(url: str, provider: Provider) -> tuple[str, str]:
    """The name and the key. urlsplit would turn the host to lower case, and keys have both."""
    name, _, key = url.partition("://")[2].strip("/").rpartition("/")
    if not key or "/" in name or ("{name}" in provider.template) != bool(name):
        raise _Unusable("url", f"write {provider.form}")
    return name, key


def has_provider(url: Any) -> bool:
    return isinstance(url, str) and "://" in url and _scheme(url) not in _PLAIN


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def with_providers(
    tree: Mapping[str, Any],
    *,
    own: str,
    find: Callable[[str], Network | None],
    place: Callable[[str, int, str], str],
) -> tuple[dict[str, Any], list[str]]:
    """The settings with an upstream for each network of their providers, after the plain ones, and the faults. `own`: the
    operator's data files. `place`: the name of a setting of the nth block of a list, with its file and line."""
    changed: dict[str, Any] = dict(tree)
    faults: list[str] = []
    for list_name in _LISTS:
        blocks = tree.get(list_name)
        if isinstance(blocks, list | tuple) and any(_is_short(block) for block in blocks):
            expansion = _Expansion(list_name, load_providers(own), find)
            changed[list_name] = [*_expanded(blocks, expansion, place, faults)]
    return changed, faults


def _is_short(block: Any) -> bool:
    return isinstance(block, Mapping) and has_provider(block.get("url"))


def _expanded(
    blocks: Sequence[Any], expansion: _Expansion, place: Callable[[str, int, str], str], faults: list[str]
) -> Iterator[Any]:
    yield from (block for block in blocks if not _is_short(block))
    seen: dict[str, int] = {}
    for index, block in enumerate(blocks):
        if not _is_short(block):
            continue
        scheme = _scheme(block["url"])
        seen[scheme] = seen.get(scheme, 0) + 1
        # Two keys of one provider: names must differ within a network.
        named = {} if seen[scheme] == 1 else {"name": f"{scheme}-key{seen[scheme]}"}
        try:
            yield from expansion.upstreams({**named, **block}, scheme)
        except _Unusable as exc:
            faults.append(f"{place(expansion.list_name, index, exc.setting)}: {exc}")
