"""Arrays that grow: system/arrays.pxd, called from a module compiled for this test."""

from __future__ import annotations

import pytest

from support.compiling import build, load

_SOURCE = """
from libc.stdint cimport uint16_t, uint32_t
from libc.stdlib cimport free

from bpsx.system.arrays cimport make_room

def grow(wanted_sizes, size_t item_bytes=sizeof(uint16_t)):
    '''Return (whether there is room, capacity, items) after each size is asked for.

    Every item of the array is set to its index plus one once it is there.
    '''
    cdef uint16_t *items = NULL
    cdef uint32_t capacity = 0, i
    found = []
    for wanted in wanted_sizes:
        there = make_room(&items, &capacity, wanted, item_bytes)
        found.append((there, capacity, [items[i] for i in range(capacity)]))
        for i in range(capacity):
            items[i] = i + 1
    free(items)
    return found
"""


@pytest.fixture(scope="module")
def grow(tmp_path_factory):
    source = tmp_path_factory.mktemp("arrays") / "growing.pyx"
    source.write_text(_SOURCE)
    return load("growing", build(source)).grow


def test_an_array_keeps_its_items_and_zeroes_the_new_ones(grow):
    first, same, doubled, large = grow([3, 16, 17, 100])
    assert first == (True, 16, [0] * 16)
    assert same == (True, 16, list(range(1, 17)))
    assert doubled == (True, 32, list(range(1, 17)) + [0] * 16)
    assert large == (True, 100, list(range(1, 33)) + [0] * 68)


def test_an_array_that_cannot_grow_stays_as_it_is(grow):
    before, refused = grow([0, 2**32 - 1], item_bytes=2**40)
    assert before == (True, 0, [])
    assert refused == (False, 0, [])
