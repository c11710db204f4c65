"""Plans of training steps as text: a changed choice shows in review."""

import pytest

from printed_plans import FOLDER, printed

PRINTED = printed()


def test_every_file_is_a_plan():
    assert {path.name for path in FOLDER.iterdir()} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_the_printed_plan(name):
    expected = (FOLDER / name).read_text()
    assert PRINTED[name] == expected, "if the change is right: python tests/printed_plans.py"
