"""Two rungs against each other: kernels, template arguments and the code that launches them."""

import dataclasses
import io
from itertools import pairwise

import pytest
from rich.console import Console

from onchip.errors import InputError
from onchip.ladders import LADDERS, find_ladder, ladder_devices
from onchip.ladders.diff import SIDE_BY_SIDE, compare, find_rungs, show_diff


def shown(ladder, *names, device="auto", width=0):
    console = Console(width=max(width, 200), record=True, file=io.StringIO())
    console.print(show_diff(*find_rungs(ladder, device, names), width))
    return console.export_text()


def test_kernels_of_one_file_are_compared_alone():
    kernels, code = compare(*find_rungs("decode", "auto", ("fused-shared", "whole-shared")))
    assert kernels.before[0] == "// launches fused_shared"
    assert kernels.after[0] == "// launches whole_shared"
    assert not any("whole_shared" in line for line in kernels.before)
    assert kernels.before[-1] == kernels.after[-1] == "}"
    assert code.before[1] == '    file, kernel, tile, is_persistent = "shared_memory.cu", "fused_shared", 4, False'
    text = shown("decode", "fused-shared", "whole-shared")
    assert text.startswith("- fused-shared: hidden activations in shared memory")
    assert "--- fused-shared (kernels)" in text
    assert "-    __shared__ float w[W * odd(SIGNALS)]" in text
    assert "report" not in text


def test_kernels_of_other_files_are_compared_with_their_headers():
    kernels, _ = compare(*find_rungs("decode", "auto", ("separate", "fused-global")))
    assert [line for line in kernels.before if line.startswith("// launches")] == [
        "// launches mat_mul<71, 72, 64>", "// launches mat_mul<64, 64, 64>", "// launches mat_mul<64, 64, 4>",
        "// launches relu_each",
    ]  # fmt: skip
    assert sum(line.startswith("// separate.cu:") for line in kernels.before) == 1
    assert any("fused_global.cu" in line for line in kernels.after)


def test_template_arguments_are_compared():
    lines = shown("decode", "rotating", "coalesced").splitlines()
    assert "-// launches rotating<2, 32, false, 2, false, false, 2>" in lines
    assert "+// launches rotating<2, 32, true, 2, false, false, 2>" in lines
    assert "+    is_transposed = True" in lines


def test_compiler_options_are_compared():
    class Unrolled(find_rungs("decode", "cuda", ("rotating", "rotating"))[0]):
        name = "unrolled"

        @classmethod
        def programs(cls):
            return tuple(dataclasses.replace(program, options=("-DUNROLL=16",)) for program in super().programs())

    kernels, _ = compare(Unrolled.__base__, Unrolled)
    assert kernels.after[:2] == (kernels.before[0], "// compiled with -DUNROLL=16")


def test_a_method_that_one_rung_inherits_is_shown_for_both():
    _, code = compare(*find_rungs("decode", "auto", ("fused-global", "fused-shared")))
    assert sum("def steps" in line for line in code.before) == sum("def steps" in line for line in code.after) == 1
    assert not any("def cost" in line for line in code.before)


def test_rungs_of_the_cpu_with_the_functions_they_call():
    text = shown("decode", "numba-serial", "numba-parallel")
    assert "-        return _layer_by_layer(x, weight_matrices(net), 1)" in text
    assert "+        return _layer_by_layer(x, weight_matrices(net), threads)" in text
    (code,) = compare(*find_rungs("backprop", "cpu", ("serial", "reordered")))
    assert any("def _patterns_by_columns" in line for line in code.before)
    assert any("def _patterns_by_rows" in line for line in code.after)
    assert any("def _sigmoid(" in line for line in code.before)  # not called by the class itself


def test_equal_sources():
    assert "the same kernels" in shown("decode", "rotating", "rotating")


def test_a_wide_terminal_shows_them_side_by_side():
    wide = shown("decode", "fused-shared", "whole-shared", width=SIDE_BY_SIDE)
    assert any("__global__" in line and line.count("__global__") == 2 for line in wide.splitlines())
    assert "@@" not in wide
    assert "@@" in shown("decode", "fused-shared", "whole-shared", width=SIDE_BY_SIDE - 1)


def test_colours_only_on_a_terminal():
    for is_terminal, colours in ((True, "standard"), (False, "auto")):
        file = io.StringIO()
        console = Console(file=file, width=100, force_terminal=is_terminal, color_system=colours)
        console.print(show_diff(*find_rungs("decode", "auto", ("rotating", "coalesced")), 100))
        assert ("\x1b[31m" in file.getvalue()) == is_terminal


def test_a_name_of_two_devices():
    assert find_rungs("scan", "auto", ("two-level", "onchip"))[0].__module__.endswith("scan_cuda")
    assert find_rungs("scan", "cpu", ("two-level", "onchip"))[0].__module__.endswith("scan")
    assert find_rungs("scan", "auto", ("two-level", "numpy"))[0].__module__.endswith("scan")
    with pytest.raises(InputError, match="different devices"):
        find_rungs("scan", "auto", ("numpy", "single-pass"))
    with pytest.raises(InputError, match="unknown rung"):
        find_rungs("scan", "cpu", ("numpy", "single-pass"))


@pytest.mark.parametrize("name", LADDERS)
def test_every_rung_can_be_compared_with_the_previous_one(name):
    for device in ladder_devices(name):
        for before, after in pairwise(find_ladder(name, device).rungs):
            assert any(sources.before != sources.after for sources in compare(before, after))
