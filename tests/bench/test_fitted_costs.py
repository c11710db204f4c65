"""The tables of fitted constants: each has a unit, a meaning, a source that exists, and a kernel that reads it."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import onchip
from onchip.kernels.cpu.cost import CPU
from onchip.kernels.cuda.common.costs import H200, costs_of
from onchip.plan import device
from onchip.plan.host_costs import HOST

SOURCES = Path(onchip.__file__).parent
ESTIMATES = Path(__file__).with_name("test_estimates.py").read_text()
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
UNITS = {
    "us", "clock", "share", "factor", "byte", "flops", "gflop", "fma", "instruction", "mma", "element", "tile",
    "bandwidth",
}  # fmt: skip

TABLES = {"CPU": CPU, "HOST": HOST} | {table.name: getattr(H200, table.name) for table in dataclasses.fields(H200)}
CONSTANTS = [
    pytest.param(constant, id=f"{name}.{constant.name}")
    for name, table in TABLES.items() for constant in dataclasses.fields(table)
]  # fmt: skip


def attributes_read():
    """The names of all attributes in the sources."""
    trees = (ast.parse(path.read_text()) for path in SOURCES.rglob("*.py"))
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_says_what_it_is(constant):
    last = constant.name.split("_")[-1]
    assert UNITS & {last, last.removesuffix("s")}, f"no unit at the end of {constant.name}"
    assert constant.metadata["what"]
    assert constant.metadata["source"]


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_source_exists_and_holds_the_estimates(constant):
    for file in re.findall(r"[\w./-]+\.json", constant.metadata["source"]):
        assert (RESULTS / file).is_file()
        name = file.partition("/")[2].removesuffix(".json")
        assert f'"{name}"' in ESTIMATES, f"no estimate is held against {file}"


def test_every_constant_is_read():
    read = attributes_read()
    unread = [constant.id for constant in CONSTANTS if constant.values[0].name not in read]
    assert not unread
    assert {table.name for table in dataclasses.fields(H200)} <= read


def test_other_gpus_have_the_fits_of_the_h200():
    assert {costs_of(each) for each in device.KNOWN.values()} == {H200}
