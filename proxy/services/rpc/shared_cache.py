"""The replies of one network that other workers or hosts have cached.

The shared cache contains only replies that never change. The hash of the chain's first block is part of every key: a chain that
is restarted under the same name, as development chains are, finds no replies of the chain before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.store.cache import SharedReplies


class SharedCache:
    def __init__(self, network_id: str, store: SharedReplies) -> None:
        self._network_id = network_id
        self._store = store
        # Identifies the chain. While it is empty, nothing is read or written.
        self.chain = ""

    def __repr__(self) -> str:
        return f"<SharedCache {self._network_id} {self.chain or 'unknown'}>"

    def is_available(self, now: float) -> bool:
        return bool(self.chain) and self._store.is_available(now)

    async def get(self, slots: Sequence[bytes]) -> Sequence[bytes | None]:
        return await self._store.get([self._key(slot) for slot in slots])

    def put(self, slot: bytes, result: bytes) -> None:
        if self.chain:
            self._store.put(self._key(slot), result)

    def _key(self, slot: bytes) -> str:
        return f"{self._network_id}:{self.chain}:{slot.hex()}"
