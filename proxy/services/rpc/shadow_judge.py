"""Judges the replies of a candidate that are not equal, byte for byte, to those that clients got.

Reads at the latest block may be answered at different blocks. If such replies differ, both upstreams are asked again at one
block that both have.
"""

from __future__ import annotations

from typing import Final

import msgspec

from proxy.chains.family import BlockRef
from proxy.core.jsonrpc import NULL
from proxy.core.trials import WHOLE_RESULT, TrialOutcome, differing_members, is_same_error
from proxy.services.rpc.method_policy import MethodPolicy
from proxy.services.rpc.probe import Probe
from proxy.services.rpc.probing import look_up, result_of
from proxy.services.rpc.reply_checks import SMALL, off_loop
from proxy.services.rpc.shadow import REPLY_S, AnsweredRead, Shadow, TriedRead

# A reply of the candidate that is longer than twice ours by this much is another one. It is not decoded: that may take seconds.
LARGER: Final = 65_536
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError)


class ShadowJudge:
    """Judges the reads of one candidate."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def __repr__(self) -> str:
        return f"<ShadowJudge of {self._shadow!r}>"

    async def run(self) -> None:
        """A supervised loop."""
        shadow = self._shadow
        while True:
            await shadow.is_doubtful.wait()
            shadow.is_doubtful.clear()
            try:
                if (tried := shadow.next_doubtful()) is not None:
                    await self._judge(tried)
            finally:
                shadow.read_next()

    async def compare(self, read: AnsweredRead) -> None:
        """Send the read to the candidate, and count how its reply compares."""
        if (tried := self._shadow.begin(read)) is not None:
            probe = tried.as_probe()
            await result_of(probe, REPLY_S)
            self._shadow.ended(tried, limited=probe.is_limited)
            await self._judge(tried)

    async def _judge(self, tried: TriedRead) -> None:
        probe = tried.probe
        assert probe is not None
        self._shadow.count(tried, *await self._outcome(tried.read, probe.result, probe))

    async def _outcome(
        self, read: AnsweredRead, result: bytes | None, probe: Probe
    ) -> tuple[TrialOutcome, tuple[str, ...]]:
        if result is None:
            if read.is_error and probe.error_reply and is_same_error(read.reply, probe.error_reply):
                return "same", ()
            if probe.lacks_method:
                return "missing", ()
            if probe.error not in ("revert", "missing_data", "behind"):
                return "error", ()
            members: tuple[str, ...] = (f"error: {probe.error}",)
        elif read.is_error:
            members = ("error",)
        else:
            members = await differences(read.policy, read.reply, result)
            if not members:
                return "same", ()
        return await self._second_look(read, members)

    async def _second_look(self, read: AnsweredRead, members: tuple[str, ...]) -> tuple[TrialOutcome, tuple[str, ...]]:
        """The replies differ. Find out whether the candidate, or one of the two replies, is of another block."""
        number = self._shadow.state.head_reader.lookups.number
        head = number.number((await look_up(self._shadow.upstream, number)).values or {})
        if head is None:
            return "error", ()
        policy = read.policy
        ref = BlockRef("none") if policy.is_plain else policy.family.block_ref(policy.method, read.params)
        if ref.moves:
            return await self._at_one_block(read, head, members)
        named = None if read.is_error else self._shadow.state.head_reader.newest_block(read.reply)
        if max(ref.number, -1 if named is None else named) > head:
            return "behind", ()
        return "different", members

    async def _at_one_block(
        self, read: AnsweredRead, head: int, members: tuple[str, ...]
    ) -> tuple[TrialOutcome, tuple[str, ...]]:
        """Ask both at a block that both have."""
        policy, at_block = read.policy, read.policy.family.at_block
        is_behind = head < self._shadow.state.heads.tip
        common = min(head, read.upstream.health.head)
        if (
            at_block is None
            or common <= 0
            or policy.family.block_ref(policy.method, read.params).tag != policy.family.latest
        ):
            return ("behind", ()) if is_behind else ("different", members)
        params = at_block(policy.method, read.params, common)
        rules = policy.family.error_rules
        probes = [
            Probe(each, policy.method.name, params, rules=rules) for each in (read.upstream, self._shadow.upstream)
        ]
        ours, theirs = [await result_of(probe, REPLY_S) for probe in probes]
        if ours is None or theirs is None:
            errors = [probe.error_reply for probe in probes]
            if ours is theirs and all(errors) and is_same_error(*errors):
                return ("behind" if is_behind else "same"), ()
            is_clear = all(probe.is_answered for probe in probes)
            return ("different", members) if is_clear else ("error", ())
        differing = await differences(policy, ours, theirs)
        return ("different", differing) if differing else (("behind" if is_behind else "same"), ())


async def differences(policy: MethodPolicy, ours: bytes, theirs: bytes) -> tuple[str, ...]:
    if ours == theirs:
        return ()
    if len(theirs) > 2 * len(ours) + LARGER:
        return (WHOLE_RESULT,)
    if len(ours) + len(theirs) <= SMALL:
        return _differences(policy, ours, theirs)
    return await off_loop(_differences, policy, ours, theirs)


def _differences(policy: MethodPolicy, ours: bytes, theirs: bytes) -> tuple[str, ...]:
    try:
        return differing_members(ours or NULL, theirs, policy.volatile)
    except _UNREADABLE:
        return (WHOLE_RESULT,)
