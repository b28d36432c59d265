"""Rules of the settings that choose upstreams by their labels and their figures.

The labels of an upstream are the words in its settings, such as `region=eu`, and those that follow from them or from its
replies: `name=`, `operator=`, `client=` and `paid`. Its figures are its lag, its error rate, its latency and the cost of the
call. A rule holds for some methods of a network, perhaps only for calls with some keys. Upstreams without a label that it
requires get no calls, and neither do those that lag or cost more than one of its limits allows. Those that it avoids or does
not prefer, that fail or are slow beyond a limit, or that exceed any limit of a rule with `then = "last"`, get a call only if no
other upstream takes it. A rule with `dry_run` is evaluated, but changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from proxy.core.credits import NANOS_PER_USD
from proxy.core.upstream_health import UpstreamHealth

Figure = Literal["lag_blocks", "error_rate", "latency_ms", "cost_usd"]
# One client's calls can make an upstream fail or be slow. A limit of these must not leave other clients without an upstream.
CAUSED_BY_CALLS: Final[frozenset[Figure]] = frozenset(("error_rate", "latency_ms"))
# How a figure that exceeds its limit is explained.
_REASONS: Final[dict[Figure, str]] = {
    "lag_blocks": "{:g} blocks behind",
    "error_rate": "{:.0%} of its calls fail",
    "latency_ms": "a latency of {:.0f} ms",
    "cost_usd": "a cost of {:.9f} US dollars",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTerms:
    """`methods`: names, which may end in `*`; without any, all methods. `keys`: ids; without any, all keys and our own calls.
    `labels`: `above` is for upstreams with all of these."""

    methods: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    above: Mapping[Figure, float] = field(default_factory=dict)
    then: Literal["exclude", "last"] = "exclude"
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule(RuleTerms):
    """`number`: its place in the settings, counted from 1."""

    number: int

    def covers(self, method: str) -> bool:
        return not self.methods or fits(self.methods, method)

    def lacks_required(self, labels: Collection[str]) -> bool:
        return any(label not in labels for label in self.require)

    def comes_last(self, labels: Collection[str]) -> bool:
        is_avoided = any(label in labels for label in self.avoid)
        return is_avoided or (bool(self.prefer) and not any(label in labels for label in self.prefer))

    def exceeded(self, labels: Collection[str], figures: Mapping[Figure, float]) -> str:
        """Why an upstream exceeds a limit, such as "14 blocks behind"; empty if it does not."""
        return ", ".join(_REASONS[name].format(figures[name]) for name in self._above_limit(labels, figures))

    def excludes(self, labels: Collection[str], figures: Mapping[Figure, float]) -> bool:
        """Whether an upstream that exceeds a limit gets no call, not even one that no other upstream takes."""
        exceeded = self._above_limit(labels, figures)
        return self.then == "exclude" and any(name not in CAUSED_BY_CALLS for name in exceeded)

    def _above_limit(self, labels: Collection[str], figures: Mapping[Figure, float]) -> list[Figure]:
        if not self.above or any(label not in labels for label in self.labels):
            return []
        return [name for name, limit in self.above.items() if figures[name] > limit]


def figures_of(member: UpstreamHealth, tip: int, method: str = "", *, archive: bool = False) -> dict[Figure, float]:
    """The present figures of an upstream. `tip`: the head of the network. The cost is that of a call of the method."""
    cost = 0 if member.meter is None else member.meter.cost_of(method, archive=archive)
    return {
        "lag_blocks": max(0, tip - member.head) if member.head else 0,
        "error_rate": member.failing_share,
        "latency_ms": member.latency_s * 1000,
        "cost_usd": cost / NANOS_PER_USD,
    }


def fits(patterns: Collection[str], method: str) -> bool:
    """Whether one of the names is that of the method. They may end in `*`."""
    return any(method.startswith(each[:-1]) if each.endswith("*") else method == each for each in patterns)


def steered(
    rules: Sequence[RoutingRule],
    members: Sequence[UpstreamHealth],
    key: str,
    *,
    tip: int = 0,
    method: str = "",
    archive: bool = False,
) -> tuple[int, int]:
    """The upstreams that must not get a call, and those that get it last, as bit sets of their indexes."""
    never, last = 0, 0
    for rule in rules:
        if rule.dry_run or (rule.keys and key not in rule.keys):
            continue
        for member in members:
            never |= rule.lacks_required(member.words) << member.index
            last |= rule.comes_last(member.words) << member.index
            if rule.above:
                figures = figures_of(member, tip, method, archive=archive)
                if rule.excludes(member.words, figures):
                    never |= 1 << member.index
                elif rule.exceeded(member.words, figures):
                    last |= 1 << member.index
    return never, last


def exclusions(rules: Sequence[RoutingRule], member: UpstreamHealth, tip: int) -> dict[int, str]:
    """The rules whose limits an upstream exceeds now, by number, each with its effect and reason."""
    reasons = {}
    for rule in rules:
        # The cost depends on the method, so a rule for several has the price of its first.
        method = rule.methods[0] if rule.methods else ""
        if reason := rule.exceeded(member.words, figures_of(member, tip, method)):
            reasons[rule.number] = f"{effect_of(rule)} by rule {rule.number}: {reason}"
    return reasons


def effect_of(rule: RoutingRule) -> str:
    if rule.dry_run:
        return "would be excluded" if rule.then == "exclude" else "would be chosen last"
    return "excluded" if rule.then == "exclude" else "chosen last"
