"""Rules that choose upstreams by their labels.

The labels of an upstream are the words in its settings, such as `region=eu`, and those that follow from them or from its
replies: `name=`, `operator=`, `client=` and `paid`. A rule holds for some methods of a network, perhaps only for calls with
some keys. Upstreams without a label that it requires get no calls. Those that it avoids, or does not prefer, get a call only if
no other upstream takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from proxy.core.upstream_health import UpstreamHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """`number`: its place in the settings, counted from 1. `methods`: names, which may end in `*`; without any, all methods.
    `keys`: ids; without any, all keys and our own calls."""

    number: int
    methods: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()

    def covers(self, method: str) -> bool:
        return not self.methods or fits(self.methods, method)

    def lacks_required(self, labels: Collection[str]) -> bool:
        return any(label not in labels for label in self.require)

    def comes_last(self, labels: Collection[str]) -> bool:
        is_avoided = any(label in labels for label in self.avoid)
        return is_avoided or (bool(self.prefer) and not any(label in labels for label in self.prefer))


def fits(patterns: Collection[str], method: str) -> bool:
    """Whether one of the names is that of the method. They may end in `*`."""
    return any(method.startswith(each[:-1]) if each.endswith("*") else method == each for each in patterns)


def steered(rules: Sequence[LabelRule], members: Sequence[UpstreamHealth], key: str) -> tuple[int, int]:
    """The upstreams that must not get a call, and those that get it last, as bit sets of their indexes."""
    never, last = 0, 0
    for rule in rules:
        if rule.keys and key not in rule.keys:
            continue
        for member in members:
            never |= rule.lacks_required(member.words) << member.index
            last |= rule.comes_last(member.words) << member.index
    return never, last
