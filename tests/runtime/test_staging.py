"""How a batch is cut into chunks, and how large arrays are copied."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.runtime.staging import (
    ALIGN_BYTES,
    LEAST_CHUNK_BYTES,
    SLOT_BYTES,
    SLOTS,
    _copy,
    chunk_rows,
    place_in_slot,
)

SIZES = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4)


@given(row_bytes=SIZES, B=st.integers(1, 1 << 24))
def test_a_chunk_fits_its_slot_and_is_worth_a_copy(row_bytes, B):
    step = chunk_rows(row_bytes, B)
    *offsets, size = place_in_slot(row_bytes, step)
    assert step >= 1
    assert size <= SLOT_BYTES
    assert all(offset % ALIGN_BYTES == 0 for offset in offsets)
    for offset, end, row in zip(offsets, [*offsets[1:], size], row_bytes, strict=True):
        assert end - offset >= row * step
    whole = sum(row_bytes) * B
    if whole >= 2 * SLOTS * LEAST_CHUNK_BYTES:
        assert -(-B // step) >= 2 * SLOTS - 1  # enough of them that every slot is busy
        assert (step + 1) * sum(row_bytes) >= LEAST_CHUNK_BYTES - ALIGN_BYTES * (len(row_bytes) + 1)


def test_a_row_larger_than_a_slot_is_a_chunk_of_its_own():
    assert chunk_rows([SLOT_BYTES, 4], 5) == 1


@pytest.mark.parametrize("nbytes", [0, 1, 1000, (1 << 20) - 1, (3 << 20) + 7, (16 << 20) + 1])
def test_a_copy_by_several_threads_is_a_copy(nbytes):
    source = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
    target = np.zeros(nbytes + 2, np.uint8)
    _copy(target[1:-1], source)
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 0
