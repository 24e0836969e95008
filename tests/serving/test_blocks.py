import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.serving.blocks import ROOT_KEY, BlockPool, page_key


def keys_of(tokens, size, extras=b""):
    keys, parent = [], ROOT_KEY
    for i in range(len(tokens) // size):
        parent = page_key(parent, tokens[i * size : (i + 1) * size], extras)
        keys.append(parent)
    return keys


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, 2)
    first = pool.allocate(3)
    assert first is not None and len(set(first)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1 and pool.usage == 0.75
    pool.free(first)
    assert pool.num_free == 4 and pool.usage == 0
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(first)


def test_cached_pages_are_matched_until_evicted_tails_first():
    pool = BlockPool(4, 2)
    keys = keys_of([1, 2, 3, 4, 5, 6], 2)
    pages = pool.allocate(3)
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
    pool.free(pages)
    assert pool.num_free == 4
    assert pool.match_prefix(keys) == pages
    taken = pool.allocate(2)  # the blank page, then the end of the cached prefix
    assert taken is not None and pages[2] in taken
    assert pool.match_prefix(keys) == pages[:2]
    pool.touch(pages[:2])
    assert pool.num_free == 0
    pool.check_integrity([taken, pages[:2]])


def test_shared_and_registered_pages_are_not_writable():
    pool = BlockPool(3, 2)
    [page] = pool.allocate(1) or []
    assert pool.is_writable(page)
    pool.touch([page])
    assert not pool.is_writable(page)
    pool.free([page])
    assert pool.is_writable(page)
    pool.register(page, page_key(ROOT_KEY, [1, 2]))
    assert not pool.is_writable(page)


def test_keys_depend_on_all_before_and_on_extras():
    base = keys_of([1, 2, 3, 4], 2)
    assert keys_of([9, 2, 3, 4], 2)[1] != base[1]
    assert keys_of([1, 2, 4, 3], 2)[0] == base[0]
    assert set(keys_of([1, 2, 3, 4], 2, b"salt")).isdisjoint(base)


def test_no_prefix_caching():
    pool = BlockPool(2, 2, prefix_caching=False)
    pages = pool.allocate(1) or []
    key = page_key(ROOT_KEY, [1, 2])
    pool.register(pages[0], key)
    assert pool.match_prefix([key]) == []


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=2), st.binary(max_size=40), st.binary(max_size=40))
def test_extras_never_collide(tokens, one, two):
    assert (page_key(ROOT_KEY, tokens, one) == page_key(ROOT_KEY, tokens, two)) == (one == two)


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random prefixes; the model beside it knows what every registered page must contain."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6, 2)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # page -> key of what was written to it last

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8))
    def admit(self, tokens):
        keys = keys_of(tokens, 2)
        shared = self.pool.match_prefix(keys)
        assert [self.content[page] for page in shared] == keys[: len(shared)]
        missing = len(keys) - len(shared)
        fits = self.pool.num_free_after_touch(shared) >= missing
        self.pool.touch(shared)
        new = self.pool.allocate(missing)
        assert (new is not None) == fits
        if new is None:
            self.pool.free(shared)
            return
        for page, key in zip(new, keys[len(shared) :], strict=True):
            assert all(page not in blocks for blocks in self.holders)
            self.content[page] = key
            self.pool.register(page, key)
        self.holders.append(shared + new)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data):
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.touch(blocks)
        self.holders.append(blocks.copy())

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def write_last(self, data):
        blocks = data.draw(st.sampled_from([blocks for blocks in self.holders if blocks]))
        if not self.pool.is_writable(blocks[-1]):
            copy = self.pool.allocate(1)
            if copy is None:
                return
            self.pool.free([blocks.pop()])
            blocks += copy
        self.content[blocks[-1]] = b"scratch"

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        self.pool.free(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def books_balance(self):
        self.pool.check_integrity(self.holders)

    def teardown(self):
        for blocks in self.holders:
            self.pool.free(blocks)
        assert self.pool.num_free == self.pool.num_pages


TestPool = PoolMachine.TestCase
