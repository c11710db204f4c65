"""Every network of the CPU's tests on a GPU: within the promise in every precision, each row's bits its own."""

import functools
import re

import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from every_network import BATCHES, PRECISIONS, compile_ahead, every_network, programs_of
from layer_cases import CASES
from onchip.errors import PlanError
from onchip.plan.device import H200
from onchip.runtime.engine import compile
from random_networks import MANY_ROWS, faults

NETWORKS = every_network()

# Layers of a dtype that no kernel of a GPU takes, though the CPU does. The list may only shrink.
POINTWISE = "ReLU|LeakyReLU|Sigmoid|Tanh|SiLU|GELU|Clip|Add|Mul|BatchNorm1d|BatchNorm2d|ToPixels|Cast"
PRODUCTS = "Linear|Conv1d|Conv2d|ConvTranspose1d|ConvTranspose2d|TokenConv"
REFUSED = {"float64": f"{POINTWISE}|{PRODUCTS}", "float16": "CumSum", "bfloat16": "CumSum"}


@functools.cache
def plans_of(name):
    """By precision; a refusal is the dtype and the kind of layer that no kernel takes."""
    try:
        return NETWORKS[name].plans
    except PlanError as refused:
        return NETWORKS[name].dtype, re.search(r"\((\w+)\)$", refused.what)[1]


def is_taken(name):
    return isinstance(plans_of(name), dict)


def test_what_no_kernel_takes_is_known_and_only_shrinks():
    refused = {plans_of(name) for name in NETWORKS if not is_taken(name)}
    known = {(dtype, kind) for dtype, kinds in REFUSED.items() for kind in kinds.split("|")}
    assert refused <= known, f"these were taken before: {sorted(refused - known)}"
    assert refused >= known, f"strike these from REFUSED: {sorted(known - refused)}"


def all_programs():
    plans = [plan for name in NETWORKS if is_taken(name) for plan in plans_of(name).values()]
    return programs_of(plans, (1, 2, 7, MANY_ROWS, *BATCHES))


def test_few_programs_serve_all_networks():
    """A network of general kernels costs no compilation: only fused MLPs are made for their shapes."""
    assert sum(not program.source.name.startswith("mlp_") for program in all_programs()) < 120


def test_precision_changes_products_and_nothing_else():
    assert list(plans_of("residual")) == list(PRECISIONS)
    assert list(plans_of(str(CASES[0]))) == ["fp32"]


# -- emulated --------------------------------------------------------------------------------------------------

EMULATED = [
    ("residual", "fp32"), ("inception", "fp16"), ("one dimension", "fp32"), ("two_towers", "bf16"),
    ("text: pads and stride, folded", "fp32"), ("image_layers", "fp32"),
]  # fmt: skip


def faults_of(name, precision, batches):
    tested = NETWORKS[name]
    engine = compile(tested.net, "cuda", precision, batch_hint=tested.batch_hint)
    return [f"{precision}: {fault}" for fault in faults(tested.net, engine, 0, batches)]


@needs_gxx
@pytest.mark.parametrize(("name", "precision"), EMULATED)
def test_on_an_emulated_gpu(monkeypatch, name, precision):
    emulate_device(monkeypatch)
    assert faults_of(name, precision, (0,)) == []


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _kernels():
    """Compiled, by all cores."""
    compile_ahead(all_programs(), H200.arch)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu(name):
    if not is_taken(name):
        pytest.skip("no kernel of a GPU takes it: REFUSED")
    assert [fault for precision in plans_of(name) for fault in faults_of(name, precision, BATCHES)] == []
