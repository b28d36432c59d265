"""Where news comes from, best first: upstreams that tell by themselves, then those that have to be asked.

One that failed rests for a while, twice as long every time; one that has worked for a while starts anew. Which one is used
is a decision for the moment: whoever uses one asks now and then whether there is a better one.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.services.rpc.networks import Route
from proxy.wire.upstream import Upstream
from proxy.wire.websocket_upstream import WebSocketUpstream

FIRST_REST_S = 0.5
LONGEST_REST_S = 30.0
# One that has worked this long did not fail because of what made it fail before.
GOOD_FOR_S = 30.0


class FeedSource:
    """One upstream as a source. `streams`: it tells by itself."""

    __slots__ = ("began", "rest_s", "rests_until", "streams", "upstream")

    def __init__(self, upstream: Upstream, *, streams: bool) -> None:
        self.upstream = upstream
        self.streams = streams
        self.rest_s = 0.0
        self.rests_until = 0.0
        self.began = 0.0

    def __repr__(self) -> str:
        return f"<FeedSource {self.upstream.label} {'streamed' if self.streams else 'polled'}>"


class FeedSources:
    def __init__(self, route: Route, *, subscribes: str, asks: str | None) -> None:
        """`subscribes` is the method that begins a stream; `asks` the one that a poll uses, None where nothing can be
        polled."""
        self._route = route
        streamed = [
            FeedSource(each, streams=True)
            for each in route.upstreams
            if isinstance(each, WebSocketUpstream) and each.health.may_serve(subscribes)
        ]
        polled = [FeedSource(each, streams=False) for each in route.upstreams if asks and each.health.may_serve(asks)]
        self._sources: Sequence[FeedSource] = [*sorted(streamed, key=_rank), *sorted(polled, key=_rank)]

    def __repr__(self) -> str:
        return f"<FeedSources {', '.join(map(repr, self._sources))}>"

    @property
    def are_none(self) -> bool:
        return not self._sources

    def best(self, now: float) -> FeedSource | None:
        """None while all of them rest."""
        awake = [source for source in self._sources if source.rests_until <= now]
        return next((source for source in awake if self._is_well(source, now)), awake[0] if awake else None)

    def is_best(self, source: FeedSource, now: float) -> bool:
        """Whether there is none before it that is worth a try."""
        before = self._sources[: self._sources.index(source)]
        return not any(each.rests_until <= now and self._is_well(each, now) for each in before)

    def next_rest_ends(self) -> float:
        return min((source.rests_until for source in self._sources), default=0.0)

    def begin(self, source: FeedSource, now: float) -> None:
        source.began = now

    def failed(self, source: FeedSource, now: float) -> None:
        if now - source.began > GOOD_FOR_S:
            source.rest_s = 0.0
        source.rest_s = min(source.rest_s * 2 or FIRST_REST_S, LONGEST_REST_S)
        source.rests_until = now + source.rest_s

    def _is_well(self, source: FeedSource, now: float) -> bool:
        health = source.upstream.health
        return not (health.lagging or health.silent or health.cordoned or now < health.rests_until)


def _rank(source: FeedSource) -> tuple[int, float]:
    return source.upstream.health.tier, -source.upstream.health.weight
