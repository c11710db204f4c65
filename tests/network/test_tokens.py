"""Token ids: an error names row and position."""

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.network.tokens import check_token_ids


def test_ids_in_range_pass():
    check_token_ids(np.array([[0, 4], [3, 2]], np.int32), 5)
    check_token_ids(np.zeros((0, 4), np.int64), 1)


@pytest.mark.parametrize("bad", [5, 30_000, -1, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_first_bad_id_is_named(bad, dtype):
    x = np.random.default_rng(0).integers(0, 5, (20, 7)).astype(dtype)
    x[[9, 9, 15], [3, 5, 0]] = bad
    with pytest.raises(InputError, match=rf"row 9, position 3: id {bad}, expected 0 to 4\n"):
        check_token_ids(x, 5)
    with pytest.raises(InputError, match=rf"row 1009, position 3: id {bad}") as caught:
        check_token_ids(x, 5, first_row=1000, name="words")
    assert "'words'" in caught.value.got


def test_rows_of_other_ranks():
    with pytest.raises(InputError, match="row 1: id 9, expected 0 to 8"):
        check_token_ids(np.array([0, 9]), 9)
    with pytest.raises(InputError, match="row 0, position 1, 0: id -2"):
        check_token_ids(np.array([[[0, 1], [-2, 1]]]), 9)
