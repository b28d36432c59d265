"""Which upstreams of a network are on another branch than the others.

All upstreams that report their heads vote with the hash that they have at one height, the highest that all near the head have.
The hash with the most votes is the network's; the upstreams of one operator have one vote together. If two branches are tied,
or half of the upstreams or operators did not vote for the winner, a branch that lacks a block that was final loses, and then
the one that has finalized fewer blocks. Upstreams further behind are compared at their own height with winners of two
operators, if there are two: no operator alone puts another one out of use.

An upstream that loses stays out until it agrees with the winners again. If it is the only one that is left, it must have the
final block that the network had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from proxy.core.heads import STALE_S, most_voted, preferred, second_of_many, voting_heads
from proxy.core.upstream_health import Standing, UpstreamHealth
from proxy.services.rpc.network_state import NetworkState
from proxy.services.rpc.probing import look_up
from proxy.services.rpc.shared_polls import SharedPolls

# Upstreams that report their heads within this time of each other are near each other.
NEAR_S = 1.0
FEWEST_NEAR_BLOCKS = 2
# Operators that must agree on a block that others are compared with, if as many have won.
JUDGES = 2
# How long a round waits for one upstream's vote.
REPLY_S = 1.0

Vote = tuple[UpstreamHealth, str]


class ForkSearch:
    def __init__(self, state: NetworkState, polls: SharedPolls, clock: Callable[[], float] = time.monotonic) -> None:
        """`polls` has the final block that all processes of the host remember."""
        self._state = state
        self._polls = polls
        self._lookups = state.head_reader.lookups
        self._clock = clock
        self._near_blocks = max(FEWEST_NEAR_BLOCKS, round(NEAR_S / state.network.facts.block_time_s))

    def __repr__(self) -> str:
        return f"<ForkSearch {self._state.network.id}, anchor {self._polls.anchor}>"

    async def verdicts(self) -> dict[UpstreamHealth, Standing]:
        """The standing of each upstream that has reported its head lately."""
        heard = self._heard()
        if len(self._state.upstreams) == 1 or self._lookups.block is None:
            return dict.fromkeys(heard, "good")
        near, behind = self._parted(heard)
        votes = await self._votes_at(min([each.head for each in near], default=0), near)
        winner = await self._winner(votes, [*near, *behind])
        # An upstream that reports no hash cannot be compared.
        standings: dict[UpstreamHealth, Standing] = {each: "good" for each in heard if not each.head_hash}
        standings |= {health: "good" if block_hash == winner else "forked" for health, block_hash in votes}
        if judges := _judges([health for health, block_hash in votes if block_hash == winner]):
            standings |= await self._compared_with(judges, behind)
            await self._move_anchor(judges)
        return standings

    def _heard(self) -> list[UpstreamHealth]:
        now, heads = self._clock(), self._state.heads
        return [
            each
            for each in self._state.group.members
            if each.head_at
            and not each.silent
            and now - each.head_at <= STALE_S
            and each.standing not in ("wrong_chain", "wrong_version")
            and (each.standing == "unchecked" or heads.is_plausible(each.head, now))
        ]

    def _parted(self, heard: list[UpstreamHealth]) -> tuple[list[UpstreamHealth], list[UpstreamHealth]]:
        """The upstreams near the head, and those behind."""
        known = sorted([each for each in heard if each.head_hash], key=lambda each: -each.head)
        if not known:
            return [], []
        floor = second_of_many(voting_heads(known)) - self._near_blocks
        return [each for each in known if each.head >= floor], [each for each in known if each.head < floor]

    async def _votes_at(self, number: int, voters: Sequence[UpstreamHealth]) -> list[Vote]:
        hashes = await asyncio.gather(*[self._hash_at(number, each) for each in voters])
        return [(health, block_hash) for health, block_hash in zip(voters, hashes, strict=True) if block_hash]

    async def _hash_at(self, number: int, health: UpstreamHealth) -> str:
        """The hash of one upstream's block; empty if it has none."""
        if number == health.head:
            return health.head_hash
        if number == health.head - 1 and health.parent_hash:
            return health.parent_hash
        lookup = self._lookups.block
        assert lookup is not None
        upstream = self._state.upstreams[health.index]
        answer = await look_up(upstream, lookup, lookup.given(number), within_s=REPLY_S)
        block = lookup.block(answer.values or {})
        return block[1] if block is not None and block[0] == number else ""

    # The winner

    async def _winner(self, votes: list[Vote], heard: Sequence[UpstreamHealth]) -> str:
        """The hash of the network. `heard`: the upstreams with a hash, also those without a vote."""
        tied = most_voted(votes)
        voters = [health for health, block_hash in votes if block_hash in tied]
        is_minority = 2 * len(voters) <= len(heard) or 2 * _operators(voters) <= _operators(heard)
        if len(tied) > 1 or is_minority or all(health.standing == "forked" for health, _ in votes):
            tied = await self._not_contradicted(tied, votes)
        if len(tied) > 1:
            tied = await self._most_final(tied, votes)
        return preferred(tied, votes) if tied else ""

    async def _not_contradicted(self, tied: list[str], votes: list[Vote]) -> list[str]:
        """Drop the branches that contradict the final block that the network had. If there are several and all contradict it,
        that block is out of date, and none is dropped."""
        anchor = self._polls.anchor
        if anchor is None:
            return tied
        number, expected = anchor
        hashes = await asyncio.gather(*[self._hash_at(number, _first_of(branch, votes)) for branch in tied])
        left = [branch for branch, block_hash in zip(tied, hashes, strict=True) if block_hash in (expected, "")]
        return left if left or len(tied) == 1 else tied

    async def _most_final(self, tied: list[str], votes: list[Vote]) -> list[str]:
        """The branches with the highest final block."""
        if self._lookups.final is None or not self._state.network.facts.finality_tag:
            return tied
        numbers = await asyncio.gather(*[self._final_of(_first_of(branch, votes)) for branch in tied])
        return [branch for branch, number in zip(tied, numbers, strict=True) if number == max(numbers)]

    async def _final_of(self, health: UpstreamHealth) -> int:
        lookup = self._lookups.final
        assert lookup is not None
        answer = await look_up(self._state.upstreams[health.index], lookup, within_s=REPLY_S)
        number = lookup.number(answer.values or {})
        return -1 if number is None else number

    # The others

    async def _compared_with(
        self, judges: Sequence[UpstreamHealth], behind: Sequence[UpstreamHealth]
    ) -> dict[UpstreamHealth, Standing]:
        hashes = await asyncio.gather(*[self._hashes_at(each.head, judges) for each in behind])
        standings = [(each, _standing(each.head_hash, known)) for each, known in zip(behind, hashes, strict=True)]
        return {each: standing for each, standing in standings if standing is not None}

    async def _move_anchor(self, judges: Sequence[UpstreamHealth]) -> None:
        """Remember a newer final block from time to time."""
        depth = self._state.network.facts.finality_blocks
        final, anchor = min([each.head for each in judges]) - depth, self._polls.anchor
        if final <= 0 or (anchor is not None and 0 <= final - anchor[0] < max(1, depth // 2)):
            return
        hashes = await self._hashes_at(final, judges)
        if len(hashes) == 1 and "" not in hashes:
            self._polls.set_anchor(final, hashes.pop(), self._clock())

    async def _hashes_at(self, number: int, judges: Sequence[UpstreamHealth]) -> set[str]:
        """The hashes that the judges have; an empty one for each that has none or does not answer."""
        return {*await asyncio.gather(*[self._hash_at(number, each) for each in judges])}


def _judges(winners: Sequence[UpstreamHealth]) -> list[UpstreamHealth]:
    """One of each operator, of as many operators as must agree."""
    of_operators: dict[str, UpstreamHealth] = {}
    for each in winners:
        of_operators.setdefault(each.operator, each)
    return [*of_operators.values()][:JUDGES]


def _standing(own: str, judged: set[str]) -> Standing | None:
    """The standing of an upstream with this hash, given the hashes of the judges. None if these disagree, or if one of them is
    missing."""
    known = judged - {""}
    if not known or own in known:
        return "good"
    return "forked" if len(judged) == 1 else None


def _operators(healths: Sequence[UpstreamHealth]) -> int:
    return len({each.operator for each in healths})


def _first_of(branch: str, votes: list[Vote]) -> UpstreamHealth:
    return next(health for health, block_hash in votes if block_hash == branch)
