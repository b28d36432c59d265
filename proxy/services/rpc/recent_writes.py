"""Which upstream of a network has received the recent writes of an account.

Upstreams that are not peers of each other, or exchange transactions slowly, know of a transaction only after it is in a block.
So reads about a transaction that an account has sent within the last minute, or about the pending state of its sender, go to
the upstream that has received it; and so does the sender's next transaction, which another upstream would keep back because of
its nonce. Transactions that were sent to private relays only are noted too, for the lookups of nulls. All workers of a host
note writes in one table (`WriteTable`), and hosts send each other what they note (`HeadExchange`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from proxy.services.rpc.method_policy import MethodPolicy
from proxy.store.shared_memory.write_table import WriteTable
from proxy.wire.upstream import Upstream

# Sent to other hosts for a write that needs no note: it has no sender and no hash, or one upstream alone takes all writes.
NO_NOTE = "0 0"
# In a note, in place of an upstream: relays have the transaction, and no upstream has.
RELAYS = 1


class RecentWrites:
    def __init__(self, network_id: str, upstreams: Sequence[Upstream], table: WriteTable) -> None:
        self._network_id = network_id
        self._table = table
        self._by_id = {int(upstream.health.upstream_id, 16): upstream for upstream in upstreams}
        # The params of the last write, and its names: they are needed before it is sent and after it was.
        self._last_sent: tuple[bytes, tuple[str, ...]] = (b"", ())

    def __repr__(self) -> str:
        return f"<RecentWrites of {self._network_id}, {len(self._by_id)} upstreams>"

    def took(self, upstream: Upstream, policy: MethodPolicy, params: bytes, client: str) -> str:
        """Note that the upstream has received a write of the client. Returns the note for other hosts: two words."""
        tags = [self._tag(client, name) for name in self._names_of_sent(policy, params, client)]
        if not tags:
            return NO_NOTE
        self._note(int(upstream.health.upstream_id, 16), tags)
        return f"{upstream.health.upstream_id} {','.join(map(str, tags))}"

    def took_privately(self, client: str, transaction: bytes) -> str:
        """Note that only relays have received a transaction of the client. Returns the note for other hosts."""
        tag = self._private_tag(client, transaction)
        self._note(RELAYS, [tag])
        return f"{RELAYS:x} {tag}"

    def is_private(self, client: str, transaction: bytes, now: float) -> bool:
        """Whether the client has lately sent the transaction to relays only."""
        return self._table.find(self._private_tag(client, transaction), now) == RELAYS

    def heard(self, note: str) -> None:
        """Another host has sent this note."""
        upstream_id, tags = note.split(" ")
        holder = int(upstream_id, 16)
        if holder in self._by_id or holder == RELAYS:
            self._note(holder, [int(tag) for tag in tags.split(",")])

    def holder(self, policy: MethodPolicy, params: bytes, client: str, now: float) -> Upstream | None:
        """The upstream to ask, if the call is about a recent write of the client, or is another write of the same sender."""
        if policy.method.kind == "write":
            name = next(reversed(self._names_of_sent(policy, params, client)), "")
        else:
            name = policy.family.subject(policy.method, params) if client else ""
        return self._by_id.get(self._table.find(self._tag(client, name), now)) if name else None

    def _names_of_sent(self, policy: MethodPolicy, params: bytes, client: str) -> tuple[str, ...]:
        """The names of a write: those of the transaction and, if it is known, of its sender."""
        if not client:
            return ()
        if self._last_sent[0] != params:
            self._last_sent = (params, policy.family.sent_subjects(params))
        return self._last_sent[1]

    def _note(self, upstream_id: int, tags: Sequence[int]) -> None:
        now = time.monotonic()
        for tag in tags:
            self._table.note(tag, upstream_id, now)

    def _private_tag(self, client: str, transaction: bytes) -> int:
        return self._tag(client, f"private {transaction.hex()}")

    def _tag(self, client: str, name: str) -> int:
        return self._table.tag_of(f"{self._network_id} {client} {name}")
