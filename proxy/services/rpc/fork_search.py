"""Which upstreams of a network are on another branch than the others.

All upstreams that report their heads vote with the hash that they have at one height, the highest that all near the head have.
The hash with the most votes is the network's. If two branches are tied, or half of the upstreams did not vote, a branch that
lacks a block that was final loses, and then the one that has finalized fewer blocks. Upstreams further behind are compared with
a winner at their own height.

An upstream that loses stays out until it agrees with the winners again. If it is the only one that is left, it must have the
final block that the network had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from proxy.core.heads import STALE_S, most_voted, preferred, second_of_many
from proxy.core.upstream_health import Standing, UpstreamHealth
from proxy.services.rpc.networks import Route
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.shared_polls import SharedPolls

# Upstreams that report their heads within this time of each other are near each other.
NEAR_S = 1.0
FEWEST_NEAR_BLOCKS = 2
# How long a round waits for one upstream's vote.
REPLY_S = 1.0

Vote = tuple[UpstreamHealth, str]


class ForkSearch:
    def __init__(self, route: Route, polls: SharedPolls, clock: Callable[[], float] = time.monotonic) -> None:
        """`polls` has the final block that all processes of the host remember."""
        self._route = route
        self._polls = polls
        self._reader = route.state.head_reader
        self._clock = clock
        self._near_blocks = max(FEWEST_NEAR_BLOCKS, round(NEAR_S / route.network.facts.block_time_s))

    def __repr__(self) -> str:
        return f"<ForkSearch {self._route.network.id}, anchor {self._polls.anchor}>"

    async def verdicts(self) -> dict[UpstreamHealth, Standing]:
        """The standing of each upstream that has reported its head lately."""
        heard = self._heard()
        if len(self._route.upstreams) == 1 or self._reader.block_call is None:
            return dict.fromkeys(heard, "good")
        near, behind = self._parted(heard)
        votes = await self._votes_at(min([each.head for each in near], default=0), near)
        winner = await self._winner(votes, of=len(near) + len(behind))
        # An upstream that reports no hash cannot be compared.
        found: dict[UpstreamHealth, Standing] = {each: "good" for each in heard if not each.head_hash}
        found |= {health: "good" if block_hash == winner else "forked" for health, block_hash in votes}
        if judge := next((health for health, block_hash in votes if block_hash == winner), None):
            found |= await self._compared_with(judge, behind)
            await self._move_anchor(judge)
        return found

    def _heard(self) -> list[UpstreamHealth]:
        now, heads = self._clock(), self._route.heads
        return [
            each
            for each in self._route.state.group.members
            if each.head_at and not each.silent and now - each.head_at <= STALE_S and each.standing != "wrong_chain"
            and (each.standing == "unchecked" or heads.is_plausible(each.head, now))
        ]  # fmt: skip

    def _parted(self, heard: list[UpstreamHealth]) -> tuple[list[UpstreamHealth], list[UpstreamHealth]]:
        """The upstreams near the head, and those behind."""
        known = sorted([each for each in heard if each.head_hash], key=lambda each: -each.head)
        if not known:
            return [], []
        floor = second_of_many([each.head for each in known]) - self._near_blocks
        return [each for each in known if each.head >= floor], [each for each in known if each.head < floor]

    async def _votes_at(self, number: int, voters: Sequence[UpstreamHealth]) -> list[Vote]:
        hashes = await asyncio.gather(*[self._hash_at(number, each) for each in voters])
        return [(health, found) for health, found in zip(voters, hashes, strict=True) if found]

    async def _hash_at(self, number: int, health: UpstreamHealth) -> str:
        """The hash of one upstream's block; empty if it has none."""
        if number == health.head:
            return health.head_hash
        if number == health.head - 1 and health.parent_hash:
            return health.parent_hash
        assert self._reader.block_call is not None
        block = self._reader.read_block(
            await Probe(self._route.upstreams[health.index], *self._reader.block_call(number)).send(REPLY_S) or b""
        )
        return block[1] if block is not None and block[0] == number else ""

    # The winner

    async def _winner(self, votes: list[Vote], of: int) -> str:
        """The hash of the network. `of`: the upstreams with a hash, also those without a vote."""
        tied = most_voted(votes)
        is_minority = 2 * len([vote for vote in votes if vote[1] in tied]) <= of
        if len(tied) > 1 or is_minority or all(health.standing == "forked" for health, _ in votes):
            tied = await self._not_contradicted(tied, votes)
        if len(tied) > 1:
            tied = await self._most_final(tied, votes)
        return preferred(tied, votes) if tied else ""

    async def _not_contradicted(self, tied: list[str], votes: list[Vote]) -> list[str]:
        """Without the branches that lack the final block that the network had. If all of several lack it, it is out of date."""
        anchor = self._polls.anchor
        if anchor is None:
            return tied
        number, expected = anchor
        hashes = await asyncio.gather(*[self._hash_at(number, _first_of(branch, votes)) for branch in tied])
        left = [branch for branch, found in zip(tied, hashes, strict=True) if found in (expected, "")]
        return left if left or len(tied) == 1 else tied

    async def _most_final(self, tied: list[str], votes: list[Vote]) -> list[str]:
        """The branches with the highest final block."""
        call = self._reader.final_block_call
        if call is None or not self._route.network.facts.finality_tag:
            return tied
        numbers = await asyncio.gather(*[self._final_of(_first_of(branch, votes)) for branch in tied])
        return [branch for branch, number in zip(tied, numbers, strict=True) if number == max(numbers)]

    async def _final_of(self, health: UpstreamHealth) -> int:
        assert self._reader.final_block_call is not None
        probe = Probe(self._route.upstreams[health.index], *self._reader.final_block_call)
        block = self._reader.read_block(await probe.send(REPLY_S) or b"")
        return -1 if block is None else block[0]

    # The others

    async def _compared_with(
        self, judge: UpstreamHealth, behind: Sequence[UpstreamHealth]
    ) -> dict[UpstreamHealth, Standing]:
        hashes = await asyncio.gather(*[self._hash_at(each.head, judge) for each in behind])
        return {
            each: "forked" if found and found != each.head_hash else "good"
            for each, found in zip(behind, hashes, strict=True)
        }

    async def _move_anchor(self, judge: UpstreamHealth) -> None:
        """Remember a newer final block from time to time."""
        depth = self._route.network.facts.finality_blocks
        final, anchor = judge.head - depth, self._polls.anchor
        if final <= 0 or (anchor is not None and 0 <= final - anchor[0] < max(1, depth // 2)):
            return
        if found := await self._hash_at(final, judge):
            self._polls.set_anchor(final, found, self._clock())


def _first_of(branch: str, votes: list[Vote]) -> UpstreamHealth:
    return next(health for health, block_hash in votes if block_hash == branch)
