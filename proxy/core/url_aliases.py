"""URLs of other services that mean networks here: patterns of hosts and paths, how they match, and which of them clash.

A pattern has placeholders, each for a whole label of the host, segment of the path or value of the query: `{network}` is one
of the alias's names of networks, `{key}` an API key, `{name}` a word of letters and digits, `{any}` anything. A host that ends
in `*` continues with one or more labels; without a host, the pattern holds for every host. Query parameters that it does not
name are kept.

A pattern means JSON-RPC or a socket, unless it names a REST path with `to`, in which `{network}` and `{name}` are filled in.
Requests that are no calls are matched with these first, calls with these last.

The pattern with the fewest placeholders in its path counts, and of several in one file the first. Two aliases whose patterns
have as many, and give different results for the same URL, are ambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NETWORK, KEY, NAME, ANY, REST = "{network}", "{key}", "{name}", "{any}", "*"
PLACEHOLDERS = (NETWORK, KEY, NAME, ANY)
_WORD = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)
# Calls and preflights; handshakes of sockets; other requests, which are a mistake of their sender.
RequestKind = Literal["call", "socket", "other"]
# The network of a name, such as `ethereum/mainnet`; None if the alias does not have the name.
NetworkFinder = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class UrlMeaning:
    """The network and key that a URL means, and the parameters of its query that say so. `path`: that of REST; else empty."""

    network: str
    key: str = ""
    taken: frozenset[str] = frozenset()
    path: str = ""

    def __repr__(self) -> str:
        return f"<UrlMeaning {self.network} {'with' if self.key else 'without'} key>"


@dataclass(frozen=True, slots=True)
class SplitUrl:
    """The labels of its host, the segments of its path and the parameters of its query, all decoded."""

    host: Sequence[str]
    path: Sequence[str]
    query: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class UrlPattern:
    """Labels of the host, segments of the path and parameters of the query. `place`: the file and line that define it. `to`:
    the REST path that it means."""

    host: tuple[str, ...]
    path: tuple[str, ...]
    query: Mapping[str, str]
    place: str
    to: str = ""

    def __repr__(self) -> str:
        return f"<UrlPattern {self.place}>"

    @classmethod
    def of(cls, path: str, *, host: str = "", place: str = "", to: str = "") -> UrlPattern:
        segments, _, query = path.partition("?")
        labels = tuple(host.split(".")) if host else (REST,)
        pairs = [each.partition("=") for each in query.split("&") if each]
        return cls(labels, tuple(segments.split("/")[1:]), {name: word for name, _, word in pairs}, place, to)

    @property
    def vagueness(self) -> int:
        return sum(word in PLACEHOLDERS for word in self.path)

    def faults(self) -> Iterator[str]:
        words = (*self.host, *self.path, *self.query.values())
        if words.count(NETWORK) != 1:
            yield f"must have {NETWORK} once"
        if words.count(KEY) > 1:
            yield f"must have {KEY} at most once"
        if KEY in self.host:
            yield f"{KEY} must not be in the host: names of hosts are not secret"
        if REST in self.host[:-1]:
            yield f"{REST} must be at the end of the host"
        if words.count(NAME) != self.to.count(NAME) or words.count(NAME) > 1:
            yield f"{NAME} must be once in the path and once in `to`, or in neither"
        if self.to and not self.to.startswith("/v1/"):
            yield "`to` must be a path of the API, such as /v1/nfts/{network}"
        for word in (*words, *self.to.split("/")):
            if ("{" in word or "}" in word) and word not in PLACEHOLDERS:
                yield f"{word}: the placeholders are {', '.join(PLACEHOLDERS)}"

    def read(self, url: SplitUrl, find: NetworkFinder) -> UrlMeaning | None:
        """The meaning of a URL, or None if it does not match."""
        is_open = self.host[-1] == REST
        wanted = self.host[:-1] if is_open else self.host
        has_length = len(url.host) > len(wanted) if is_open else len(url.host) == len(wanted)
        if len(url.path) != len(self.path) or not (has_length or not wanted):
            return None
        given = dict(url.query)
        # A parameter that is there twice could be two keys.
        if self.query and (not self.query.keys() <= given.keys() or len(given) != len(url.query)):
            return None
        texts = {KEY: ""}
        pairs = [*zip(wanted, url.host, strict=False), *zip(self.path, url.path, strict=True)]
        pairs += [(word, given[name]) for name, word in self.query.items()]
        for word, text in pairs:
            if (word not in PLACEHOLDERS and word != text) or (word in PLACEHOLDERS and not text):
                return None
            texts[word] = text
        network = find(texts[NETWORK])
        if network is None or not _WORD.fullmatch(texts.get(NAME, "x")):
            return None
        path = self.to.replace(NETWORK, network.replace("/", "-")).replace(NAME, texts.get(NAME, ""))
        return UrlMeaning(network, texts[KEY], frozenset(self.query), path)


@dataclass(frozen=True, slots=True)
class UrlAlias:
    """One service's URLs."""

    name: str
    patterns: tuple[UrlPattern, ...]
    find: NetworkFinder
    # Names that are listed in its file.
    networks: Mapping[str, str]


class UrlAliases:
    """All aliases that are switched on."""

    def __init__(self, aliases: Sequence[UrlAlias] = ()) -> None:
        patterns = [(pattern, alias.find) for alias in aliases for pattern in alias.patterns]
        patterns.sort(key=lambda each: each[0].vagueness)
        self._of_calls = [each for each in patterns if not each[0].to]
        self._of_rest = [each for each in patterns if each[0].to]
        self._names = [alias.name for alias in aliases]

    def __repr__(self) -> str:
        return f"<UrlAliases {', '.join(self._names)}>"

    def __bool__(self) -> bool:
        return bool(self._of_calls or self._of_rest)

    def read(self, url: SplitUrl, kind: RequestKind = "call") -> UrlMeaning | None:
        if kind == "socket":
            return _first(self._of_calls, url)
        if kind == "call":
            return _first(self._of_calls, url) or _first(self._of_rest, url)
        meaning = _first(self._of_rest, url) or _first(self._of_calls, url)
        # A page that is opened in a browser has no key.
        return meaning if meaning is not None and (meaning.path or meaning.key) else None


def _first(patterns: Sequence[tuple[UrlPattern, NetworkFinder]], url: SplitUrl) -> UrlMeaning | None:
    for pattern, find in patterns:
        if (meaning := pattern.read(url, find)) is not None:
            return meaning
    return None


def clashes(aliases: Sequence[UrlAlias]) -> Iterator[str]:
    """Two patterns of different aliases that give different results for some URL."""
    for index, one in enumerate(aliases):
        for other in aliases[index + 1 :]:
            for left in one.patterns:
                yield from (_clash(left, right) for right in other.patterns if _overlap(one, left, other, right))


def _clash(left: UrlPattern, right: UrlPattern) -> str:
    return f"{left.place}: is ambiguous, {right.place} matches the same URLs: switch one of the aliases off"


def _overlap(one: UrlAlias, left: UrlPattern, other: UrlAlias, right: UrlPattern) -> bool:
    if (
        bool(left.to) != bool(right.to)
        or left.vagueness != right.vagueness
        or len(left.path) != len(right.path)
        or not _hosts_overlap(one, left.host, other, right.host)
    ):
        return False
    # If both name a parameter of the query, its values must be able to agree.
    shared = [(left.query[name], right.query[name]) for name in left.query.keys() & right.query.keys()]
    pairs = [*zip(left.host, right.host, strict=False), *zip(left.path, right.path, strict=True), *shared]
    if not all(_agree(one, word, other, text) for word, text in pairs):
        return False
    # The same URL with the same meaning is not ambiguous.
    is_same = left.to == right.to and (NETWORK, NETWORK) in pairs
    if not is_same or {(KEY, ANY), (ANY, KEY)} & set(pairs):
        return True
    return any(other.find(name) not in (None, network) for name, network in one.networks.items()) or any(
        one.find(name) not in (None, network) for name, network in other.networks.items()
    )


def _hosts_overlap(one: UrlAlias, left: Sequence[str], other: UrlAlias, right: Sequence[str]) -> bool:
    ends = left[-1] == REST, right[-1] == REST
    if not any(ends):
        return len(left) == len(right)
    return all(ends) or (len(left) >= len(right) if ends[1] else len(right) >= len(left))


def _agree(one: UrlAlias, word: str, other: UrlAlias, text: str) -> bool:
    """Whether some label or segment fits both."""
    if REST in (word, text):
        return True
    if not word or not text:
        return word == text
    if word == text == NETWORK:
        return any(other.find(name) for name in one.networks) or any(one.find(name) for name in other.networks)
    if word in (KEY, NAME, ANY) or text in (KEY, NAME, ANY):
        return True
    if NETWORK in (word, text):
        return bool(one.find(text) if word == NETWORK else other.find(word))
    return word == text
