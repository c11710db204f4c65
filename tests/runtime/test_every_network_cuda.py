"""Every network of the CPU's tests on a GPU: within the promise in every precision, each row's bits its own."""

import functools
import re

import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from every_network import BATCHES, compile_ahead, every_network, programs_of
from onchip.errors import PlanError
from onchip.plan.device import H200
from onchip.runtime.engine import compile
from random_networks import MANY_ROWS, faults

NETWORKS = {str(judged): judged for judged in every_network()}

# Layers of a dtype that no kernel of a GPU takes, though the CPU does. The list may only shrink.
POINTWISE = "ReLU|LeakyReLU|Sigmoid|Tanh|SiLU|GELU|Clip|Add|Mul|BatchNorm1d|BatchNorm2d|ToPixels|Cast"
PRODUCTS = "Linear|Conv1d|Conv2d|ConvTranspose1d|ConvTranspose2d|TokenConv"
REFUSED = {"float64": f"{POINTWISE}|{PRODUCTS}", "float16": "CumSum", "bfloat16": "CumSum"}


@functools.cache
def why_refused(name):
    """The dtype and the kind of layer that no kernel takes; None if there is a plan."""
    judged = NETWORKS[name]
    try:
        _ = judged.plan
    except PlanError as refused:
        kind = re.search(r"\((\w+)\)$", refused.what)[1]
        return judged.dtype, kind
    return None


def test_what_no_kernel_takes_is_known_and_only_shrinks():
    refused = {found for name in NETWORKS if (found := why_refused(name))}
    known = {(dtype, kind) for dtype, kinds in REFUSED.items() for kind in kinds.split("|")}
    assert refused <= known, f"these were taken before: {sorted(refused - known)}"
    assert refused >= known, f"strike these from REFUSED: {sorted(known - refused)}"


TAKEN = [name for name in NETWORKS if why_refused(name) is None]


def test_few_programs_serve_all_networks():
    """A network of general kernels costs no compilation: only fused MLPs are made for their shapes."""
    programs = programs_of([NETWORKS[name].plan for name in TAKEN], BATCHES)
    general = {program for program in programs if not program.source.name.startswith("mlp_")}
    assert len(general) < 110


def judge(judged, batches):
    engine = compile(judged.net, "cuda", judged.precision, batch_hint=judged.batch_hint)
    assert faults(judged.net, engine, 0, batches) == []


# -- emulated --------------------------------------------------------------------------------------------------

EMULATED = [
    "residual, fp32", "inception, fp16", "one dimension, fp32", "text: pads and stride, folded, fp32",
    "two towers, bf16", "image layers, fp32",
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("name", EMULATED)
def test_on_an_emulated_gpu(monkeypatch, name):
    emulate_device(monkeypatch)
    judge(NETWORKS[name], (0,))


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _kernels():
    """Compiled, by all cores."""
    batches = (1, 2, 7, MANY_ROWS, *BATCHES)
    compile_ahead(programs_of([NETWORKS[name].plan for name in TAKEN], batches), H200.arch)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", TAKEN)
def test_on_a_gpu(name):
    judge(NETWORKS[name], BATCHES)
