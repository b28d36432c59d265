"""The replies of one network that other workers or hosts have cached.

The shared cache contains only replies that never change. The hash of the chain's first block is part of every key: a chain that
is restarted under the same name, as development chains are, finds no replies of the chain before it. If an upstream turns out
to be on another branch, the replies that this worker has put there lately are deleted, as its own cache is cleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from proxy.store.valkey.shared_replies import OnFound, SharedReplies

# Replies that this worker remembers having stored, so that it can delete them: those of a busy minute.
REMEMBERED = 4096


class SharedCache:
    def __init__(self, network_id: str, store: SharedReplies) -> None:
        self._network_id = network_id
        self._store = store
        self._recent: deque[str] = deque(maxlen=REMEMBERED)
        # Identifies the chain. While it is empty, nothing is read or written.
        self.chain = ""

    def __repr__(self) -> str:
        return f"<SharedCache {self._network_id} {self.chain or 'unknown'}>"

    def identified(self, chain: str) -> None:
        """From now on, replies are read and stored as those of this chain; empty if it is unknown."""
        self.chain = chain

    def is_available(self, now: float) -> bool:
        return bool(self.chain) and self._store.is_available(now)

    def look(self, cache_keys: Sequence[bytes], on_found: OnFound) -> None:
        self._store.look([self._key(cache_key) for cache_key in cache_keys], on_found)

    def put(self, cache_key: bytes, result: bytes) -> None:
        if self.chain:
            name = self._key(cache_key)
            self._recent.append(name)
            self._store.put(name, result)

    def forget_recent(self) -> None:
        """Delete the replies that this worker stored recently: they may be wrong."""
        self._store.forget(self._recent)
        self._recent.clear()

    def _key(self, cache_key: bytes) -> str:
        return f"{self._network_id}:{self.chain}:{cache_key.hex()}"
