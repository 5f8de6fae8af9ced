"""Pages of the KV cache: who owns which, and which hold a prefix that can be used again. No tensors here.

A page holds `page_size` consecutive tokens of one sequence, for all layers. A page is free, owned (by one request or,
for a shared prefix, by several), or cached: owned by nobody but still holding a known prefix, and reclaimed oldest
first. A full page's identity is the hash of its tokens chained to its predecessor's, so equal prefixes have equal
identities whatever request computed them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def page_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a full page: a digest of its predecessor's identity (empty for the first) and its tokens."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """The one allocator of KV pages."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._prefix_cache = prefix_cache
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # owned by nobody, oldest first

    @property
    def available(self) -> int:
        """Pages that could be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def owned(self) -> int:
        """Pages in use by requests."""
        return self.num_pages - self.available

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages for one owner, or None, and nothing taken, if there are not as many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._reclaim()
            self._owners[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """One owner gives the pages back. Those that hold a known prefix stay cached; the tail is reclaimed first."""
        for page in reversed(pages):
            if self._owners[page] < 1:
                raise AssertionError(f"page {page} is released but nobody owns it")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Take ownership of the cached pages that hold the longest known prefix of `tokens`, with their identities."""
        pages: list[int] = []
        hashes: list[bytes] = []
        if not self._prefix_cache:
            return pages, hashes
        size, previous = self.page_size, b""
        for end in range(size, len(tokens) + 1, size):
            previous = page_hash(previous, tokens[end - size : end])
            page = self._page_of.get(previous)
            if page is None:
                break
            if self._owners[page] == 0:
                del self._cached[page]
            self._owners[page] += 1
            pages.append(page)
            hashes.append(previous)
        return pages, hashes

    def remember(self, page: int, identity: bytes) -> None:
        """Note that an owned page now holds this full prefix. A prefix that is known already keeps its first page."""
        if self._prefix_cache and identity not in self._page_of and page not in self._hash_of:
            self._page_of[identity] = page
            self._hash_of[page] = identity

    def reset_prefix_cache(self) -> None:
        """Forget every prefix; pages in use stay with their owners."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def check(self, owned_by_requests: Sequence[Sequence[int]]) -> None:
        """AssertionError unless ownership adds up: each page is free, cached or owned by exactly the requests given."""
        expected = [0] * self.num_pages
        for pages in owned_by_requests:
            for page in pages:
                expected[page] += 1
        if expected != self._owners:
            wrong = [page for page in range(self.num_pages) if expected[page] != self._owners[page]]
            raise AssertionError(f"KV pages leaked or owned twice: {wrong[:10]}")
        idle = sorted([*self._free, *self._cached])
        if idle != [page for page in range(self.num_pages) if expected[page] == 0]:
            raise AssertionError("the free list and the prefix cache do not hold exactly the pages that nobody owns")
        if {page: identity for identity, page in self._page_of.items()} != self._hash_of:
            raise AssertionError("the prefix index and the pages disagree")

    def _reclaim(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
