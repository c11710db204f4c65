"""Every network of the CPU tests on a GPU: within tolerance in every precision, bits independent of the batch."""

import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from every_network import BATCHES, PRECISIONS, compile_ahead, different_plans, every_network, programs_of
from layer_cases import CASES
from onchip.plan.device import H200
from onchip.runtime.engine import compile
from random_networks import MANY_ROWS, faults

NETWORKS = every_network()


def programs_for(plans):
    return programs_of(plans, (1, 2, 7, MANY_ROWS, *BATCHES))


def test_few_programs_serve_all_networks():
    """A network of general kernels costs no compilation: only fused MLPs are compiled for their shapes."""
    plans = [plan for each in NETWORKS.values() for plan in different_plans(each.net, each.precisions[:1]).values()]
    assert sum(program.source.parent.name != "mlp" for program in programs_for(plans)) < 340


def test_precision_changes_products_and_nothing_else():
    assert list(NETWORKS["residual"].plans) == list(PRECISIONS)
    assert list(NETWORKS[str(CASES[0])].plans) == ["fp32"]


# -- emulated --------------------------------------------------------------------------------------------------

EMULATED = [
    ("inception", "fp16"), ("one dimension", "fp32"), ("two_towers", "bf16"), ("text: pads and stride, folded", "fp32"),
    ("image_layers", "fp32"),
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
    """Compiled on all cores."""
    plans = [plan for each in NETWORKS.values() for plan in each.plans.values()]
    compile_ahead(programs_for(plans), H200.arch)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu(name):
    assert [fault for precision in NETWORKS[name].plans for fault in faults_of(name, precision, BATCHES)] == []
