"""Pages of KV cache: who holds them, and which of them hold a known prefix. Plain Python: no jax."""

import array
import collections
import hashlib
from collections.abc import Iterable, Sequence

ROOT_KEY = bytes(hashlib.sha256().digest_size)


def page_key(parent: bytes, tokens: Sequence[int], extras: bytes = b"") -> bytes:
    """SHA-256 of a full page of tokens and all before it: key(page) = H(key(previous page), tokens, extras).

    The first page's parent is ROOT_KEY. A cryptographic hash, since a collision would show one user's text to another.
    """
    digest = hashlib.sha256(parent)
    digest.update(array.array("q", tokens))
    digest.update(extras)
    return digest.digest()


class BlockPool:
    """Reference-counted pages 0..num_pages-1 of page_size tokens, and a prefix cache over them.

    A page is held (references > 0) or free. A registered page holds the keys and values of a known prefix; it stays
    matchable while it is free, until `allocate` needs it, least recently freed first. Its content must not change, nor
    that of a page with several holders: a holder writes to a copy of it instead (see `is_writable`).
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.query_tokens = 0  # tokens of admitted sequences looked up in the prefix cache, and found there
        self.hit_tokens = 0
        self._references = [0] * num_pages
        self._blank: collections.deque[int] = collections.deque(range(num_pages))  # free, content worthless
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # free, registered; oldest first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the pages that are held; free pages with a cached prefix do not count."""
        return 1 - self.num_free / self.num_pages

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are free."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def touch(self, pages: Iterable[int]) -> None:
        """One more reference for each; a free cached page comes back to life."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """One reference less for each. The last pages become the first to be evicted: a prefix outlives its tails."""
        for page in reversed(pages):
            if self._references[page] == 0:
                raise ValueError(f"page {page} is freed twice")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def match_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix. They are not held yet: `touch` them before the next allocate."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, key: bytes) -> None:
        """Makes a held, fully written page matchable. Nothing changes when another page has the key already."""
        if self._references[page] == 0:
            raise ValueError(f"page {page} is registered but free")
        if self.prefix_caching and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def num_free_after_touch(self, pages: Iterable[int]) -> int:
        """num_free if `pages` were touched."""
        return self.num_free - sum(self._references[page] == 0 for page in pages)

    def is_writable(self, page: int) -> bool:
        """Held once and not registered, so that writing to it disturbs nobody."""
        return self._references[page] == 1 and page not in self._key_of

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the books balance: `holders` are the block lists of everyone who holds pages."""
        held = collections.Counter(page for blocks in holders for page in blocks)
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a page is in the free list twice"
        assert not blank & cached, "a page is both blank and cached"
        for page in range(self.num_pages):
            assert self._references[page] == held[page], (
                f"page {page}: {self._references[page]} references, {held[page]} holders"
            )
            assert (self._references[page] == 0) == (page in blank or page in cached), f"page {page}: free and held"
            assert not (page in blank and page in self._key_of), f"page {page}: blank but registered"
            assert not (page in cached and page not in self._key_of), f"page {page}: cached without a key"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "the two key tables disagree"
