"""Contradicted replies: what an upstream replied, and what others replied or proved, kept as evidence for operators.

They contain no account and no key. Params and replies are cut, so that large ones do not fill the database; digests are of the
whole replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Characters of params and of each reply that are kept.
MOST_PARAMS, MOST_REPLY = 2048, 4096
# `outvoted`: a quorum agreed on another reply. `refuted`: the chain's hashes contradict it. `split`: operators disagree and
# no reply has enough votes, so it is not known which of them is wrong.
ContradictionKind = Literal["outvoted", "refuted", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContradictedReply:
    """`upstream` gave `reply`, and `others` gave or proved `other_reply`. `reason`: why a proof failed; otherwise empty."""

    # Unix time.
    at: float
    network: str
    method: str
    params: str
    kind: ContradictionKind
    # As in X-Verify.
    verified_by: str
    upstream: str
    operator: str
    reply: str
    digest: str
    # The labels and operators of upstreams.
    others: tuple[tuple[str, str], ...]
    other_reply: str
    other_digest: str
    reason: str = ""

    @property
    def subject(self) -> tuple[str, ...]:
        """Equal for repeated contradictions, of which one is stored."""
        return self.kind, self.network, self.method, self.params, self.upstream, self.digest, self.other_digest


def cut(data: bytes, most: int) -> str:
    """The beginning of a JSON text."""
    return data[: 4 * most].decode("utf-8", "replace")[:most]
