"""Tables: columns if they fit the width, else one paragraph per row. Rates and counts in words."""

import pytest

from onchip.network.text import columns, fitted_columns, html_table, plural, rate_text

HEAD = ["name", "what it is", "size"]
ROWS = [["a", "a first thing of some length", "1"], ["b", "", "22"]]


def test_if_it_fits_it_is_a_table():
    wide = columns(HEAD, ROWS, right=(2,))
    assert fitted_columns(HEAD, ROWS, 80, right=(2,)) == wide
    assert wide.splitlines()[1] == "a     a first thing of some length     1"


def test_if_it_does_not_fit_every_cell_is_in_a_paragraph():
    told = fitted_columns(HEAD, ROWS, 24)
    assert max(map(len, told.splitlines())) <= 24
    assert " ".join(told.split()) == "a: what it is a first thing of some length, size 1 b: size 22"


def test_html_is_escaped():
    assert html_table(["<b>"], [["&"]]) == (
        "<table><thead><tr><th>&lt;b&gt;</th></tr></thead><tbody><tr><td>&amp;</td></tr></tbody></table>"
    )


def test_counts_agree():
    assert [plural(count, "epoch") for count in (0, 1, 2000)] == ["0 epochs", "1 epoch", "2,000 epochs"]


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(0, "0 GB/s"), (138e6, "0.138 GB/s"), (69.24e9, "69.2 GB/s"), (999.4e9, "999 GB/s"), (999.6e9, "1 TB/s"),
     (3.834e12, "3.83 TB/s"), (374e12, "374 TB/s")],
)  # fmt: skip
def test_rates(per_s, text):
    assert rate_text(per_s, "B") == text
