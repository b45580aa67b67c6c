"""The KV arena's blocks: who holds which, and which tokens a block's keys and values stand for.

Rules
- A block is free (no content), held (refs >= 1) or cached (refs 0, content known, in the LRU): free + cached + held = n_blocks.
- A full block's key is blake2b(parent's key + its tokens); a hit compares the tokens again. A partial block has no key: it
  is found through its parent by the tokens it begins with, and is copied, never shared, since its holder goes on writing.
- A sequence gives its blocks back last to first, so that within a prefix the tail is always older in the LRU than the head
  and is evicted first: a cached block's parents are cached too.
- Content is what earlier steps computed, nothing else: register() is called after a step, never for rows still in flight.

Pure. Knows block ids, keys and tokens' bytes; must not know sequences, requests or the core (`copy` is handed in).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Callable, Iterable, Sequence as Seq

from .base import BLOCK

ROOT = bytes(16)            # the parent key of a prompt's first block
BYTES = 4 * BLOCK           # of one block's tokens: array('i')


def chain(parent: bytes, data: bytes) -> bytes:
    """The key of a block of tokens (array('i') bytes) that follows `parent`."""
    return blake2b(parent + data, digest_size=16).digest()


def chain_keys(keys: list[bytes], tokens: array) -> None:
    """Extends keys to every full block of tokens."""
    data = memoryview(tokens).cast("B")
    try:
        parent = keys[-1] if keys else ROOT
        for i in range(len(keys), len(tokens) // BLOCK):
            parent = blake2b(parent + data[i * BYTES:(i + 1) * BYTES], digest_size=16).digest()
            keys.append(parent)
    finally:
        data.release()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two array('i') byte strings share."""
    n = min(len(a), len(b)) // 4
    if a[:4 * n] == b[:4 * n]:
        return n
    low, high = 0, n        # a[:low] equal, a[:high] not
    while high - low > 1:
        mid = (low + high) // 2
        if a[:4 * mid] == b[:4 * mid]:
            low = mid
        else:
            high = mid
    return low


class Blocks:
    """allocate / hold / release count references; match / partial / register are the prefix cache."""

    def __init__(self, n_blocks: int, *, cache: bool = True) -> None:
        self.n_blocks = n_blocks
        self.cache = cache
        self.n_evicted = 0
        self.on_evict: Callable[[int, bytes, bytes, bytes], None] | None = None    # (block, key, parent, data), full ones
        self.on_full: Callable[[int, bytes, bytes, bytes], None] | None = None     # likewise, when a block becomes known
        self._free = list(range(n_blocks))
        heapify(self._free)
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * n_blocks
        self._key: list[bytes | None] = [None] * n_blocks
        self._parent = [ROOT] * n_blocks
        self._data = [b""] * n_blocks           # tokens of a registered block; b"": unregistered
        self._by_key: dict[bytes, int] = {}
        self._children: dict[tuple[bytes, bytes], dict[int, None]] = {}     # (parent key, first token) -> blocks

    # -- references -----------------------------------------------------------------------------------------------------

    @property
    def n_available(self) -> int:
        """Blocks that allocate() can still give."""
        return len(self._free) + len(self._lru)

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_cached(self) -> int:
        return len(self._lru)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> int | None:
        """A block of one's own, the lowest free one or else the longest unused cached one; None: every block is held."""
        if self._free:
            block = heappop(self._free)
        elif self._lru:
            block, _ = self._lru.popitem(last=False)
            if self.on_evict is not None and self._key[block] is not None:
                self.on_evict(block, self._key[block], self._parent[block], self._data[block])
            self._forget(block)
            self.n_evicted += 1
        else:
            return None
        self._refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference to a held or cached block."""
        if self._refs[block] == 0:
            del self._lru[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one leaves the content cached, or the block free where it has none."""
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if self._data[block] and self._key[block] is None:
            self._merge(block)
        if self._data[block]:
            self._lru[block] = None
        else:
            heappush(self._free, block)

    def release_all(self, table: Iterable[int]) -> None:
        """Last to first."""
        for block in reversed(list(table)):
            self.release(block)

    # -- the prefix cache -----------------------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def match(self, keys: Seq[bytes], data: bytes, n_tokens: int) -> list[int]:
        """The full blocks known for the first n_tokens of a prompt (data: its tokens, keys: its full blocks'). Takes no
        reference."""
        found: list[int] = []
        for i in range(min(len(keys), n_tokens // BLOCK)):
            block = self._by_key.get(keys[i])
            if block is None or self._data[block] != data[i * BYTES:(i + 1) * BYTES]:
                break
            found.append(block)
        return found

    def partial(self, parent: bytes, rest: bytes) -> tuple[int, int]:
        """(block, n): the block after `parent` that shares most leading tokens with `rest`; n 0: none does."""
        best, best_n = -1, 0
        for block in self._children.get((parent, rest[:4]), ()):
            n = common_tokens(self._data[block], rest)
            if n > best_n:
                best, best_n = block, n
        return best, best_n

    def register(self, block: int, parent: bytes, data: bytes, key: bytes | None) -> int:
        """Says what a held block contains: a full block's key and tokens, or (key None) a partial one's tokens so far.
        Returns the block to use from now on: another one, already held for the caller, where the same content exists."""
        if not self.cache or not data:
            return block
        if key is not None:
            other = self._by_key.get(key)
            if other is not None and other != block:
                if self._data[other] != data:       # a collision of keys: leave the newcomer out
                    return block
                self.hold(other)
                self.release(block)
                return other
            self._by_key[key] = block
        self._data[block] = data
        self._key[block] = key
        self._parent[block] = parent
        self._children.setdefault((parent, data[:4]), {})[block] = None
        if key is not None and self.on_full is not None:
            self.on_full(block, key, parent, data)
        return block

    def _merge(self, block: int) -> None:
        """Two cached blocks never say the same: of a partial one and a sibling that begins alike the shorter one goes."""
        data = self._data[block]
        siblings = self._children[self._parent[block], data[:4]]
        for other in list(siblings):
            if other == block:
                continue
            if self._data[other].startswith(data):
                self._forget(block)
                return
            if self._refs[other] == 0 and self._key[other] is None and data.startswith(self._data[other]):
                del self._lru[other]
                self._forget(other)
                heappush(self._free, other)

    def _forget(self, block: int) -> None:
        data = self._data[block]
        if not data:
            return
        where = self._parent[block], data[:4]
        siblings = self._children[where]
        del siblings[block]
        if not siblings:
            del self._children[where]
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
        self._key[block] = None
        self._data[block] = b""

    def clear(self) -> None:
        """Forgets all cached content; held blocks stay held, without content."""
        for block in range(self.n_blocks):
            self._forget(block)
        for block in self._lru:
            heappush(self._free, block)
        self._lru.clear()

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError where the books don't balance. tables: of every sequence that holds blocks."""
        held = [0] * self.n_blocks
        for table in tables:
            seen = set()
            for block in table:
                assert block not in seen, f"block {block} twice in one table"
                seen.add(block)
                held[block] += 1
        assert held == self._refs, "references and tables differ"
        free, cached = set(self._free), set(self._lru)
        assert len(free) == len(self._free) and not free & cached, "a block is free twice"
        for block in range(self.n_blocks):
            places = (block in free) + (block in cached) + (held[block] > 0)
            assert places == 1, f"block {block} stands in {places} places"
            assert block not in free or not self._data[block], f"free block {block} has content"
            assert block not in cached or self._data[block], f"cached block {block} has no content"
            key = self._key[block]
            assert key is None or self._by_key[key] == block and len(self._data[block]) == BYTES
        assert sum(map(len, self._children.values())) == sum(1 for d in self._data if d)
