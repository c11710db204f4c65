"""The reduction order: stated by every claim, the same for every number of rows, and part of a plan."""

import dataclasses
import json

import pytest

from checks import random_mlp
from onchip.errors import PlanError
from onchip.kernels import cpu
from onchip.kernels.cuda.mlp.fused import MlpFusedLowering
from onchip.kernels.cuda.mlp.tensor_core import MlpTensorCoreLowering
from onchip.network.build import mlp, sequential
from onchip.network.io import with_io
from onchip.network.layers import CumSum, ReLU, Softmax
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import A100, H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Claim, Job
from onchip.plan.plan_json import array_weights, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.workloads import faces, sentiment
from random_networks import random_network
from takers import CPU

BATCHES = (1, 7, 64, 1024, 4097, 1 << 20)


def claims(net, device, job):
    """Every claim of every kernel, by kernel, label and layers."""
    found = {}
    for kernel in kernels_for(device):
        for start in range(len(net.nodes)):
            if job.precision in kernel.precisions:
                for answer in kernel.claims(net, start, device, job):
                    if isinstance(answer, Claim):
                        found[kernel.name, answer.label, answer.nodes] = answer
    return found


def assert_one_order(net, device, precision="fp32", **options):
    orders = {}
    for B in BATCHES:
        for key, claim in claims(net, device, Job(precision, B, **options)).items():
            assert orders.setdefault(key, claim.order) == claim.order, (key, B)
    return orders


@pytest.mark.parametrize("seed", range(25))
def test_no_batch_changes_the_order_of_a_sum_on_a_cpu(seed):
    assert_one_order(random_network(seed), CPU)


def test_the_workloads_have_one_order_on_a_cpu():
    for net in (faces.network(), sentiment.network(), mlp(784, 320, 160, 10, output="LogSoftmax")):
        orders = assert_one_order(make_plan(net, CPU, cpu.KERNELS, Job(batch=10**7)).network, CPU)
        told = {kernel for (kernel, _, _), order in orders.items() if order}
        assert told & {"mlp_fused", "conv_fused", "token_max"}

    step = training_step(mlp(784, 320, 160, 10), TrainingStep("cross_entropy"))
    trained = {kernel: order for (kernel, _, _), order in assert_one_order(step, CPU).items()}
    assert "gradients by rows in order" in trained["mlp_train"]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.arch)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("io", ["float32", "float16"])
@pytest.mark.parametrize("widths", [(72, 64, 64, 4), (16, 32, 1), (784, 100, 10), (2000, 1500, 10)], ids=str)
def test_no_batch_changes_the_order_of_a_sum_on_a_gpu(widths, io, precision, device):
    net = with_io(mlp(*widths, output="Softmax"), io)
    orders = assert_one_order(net, device, precision)
    assert any(kernel.startswith("mlp") and order for (kernel, _, _), order in orders.items())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("widths", [(72, 64, 64, 4), (16, 32, 1), (784, 320, 160, 10)], ids=str)
def test_a_batch_decides_only_which_rows_go_together(widths, precision):
    """Lowerings for two numbers of rows differ only in row tiles and warps."""
    net = with_io(mlp(*widths), "float16")
    made = [claims(net, H200, Job(precision, B)) for B in BATCHES]
    for key in made[0]:
        facts = [found[key].facts for found in made if key in found]
        for one in facts:
            if isinstance(one, MlpTensorCoreLowering | MlpFusedLowering):
                assert dataclasses.replace(one, tiling=facts[0].tiling) == facts[0]
            if isinstance(one, MlpTensorCoreLowering):
                assert one.tiling.by == facts[0].tiling.by


def programs(claim, B):
    """Except for counts in kernels that only move data."""
    names = [launch.program.name_expression for launch in claim.facts.at(B).launches]
    return [name.replace(", long long>", ", u32>") for name in names]


@pytest.mark.parametrize("row", [(5,), (1000,), (100_000,), (3, 7), (100_000, 3), (2, 4096)], ids=str)
@pytest.mark.parametrize("axis", [1, -1])
def test_a_lowering_has_the_same_programs_for_every_batch(row, axis):
    """A reduction order depends only on template arguments and the row."""
    scan = sequential(TensorType(("B", *row)), [("s", CumSum(axis=axis))], {})
    assert_same_programs(scan, Job())
    assert_one_order(scan, H200)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_and_so_has_an_mlp(precision):
    assert_same_programs(mlp(72, 64, 64, 4), Job(precision))


def assert_same_programs(net, job):
    for (kernel, _, _), claim in claims(net, H200, job).items():
        for B in BATCHES if kernel.startswith("mlp") else ():  # gemm tiles depend on the rows, with the same bits
            assert programs(claim, B) == programs(claim, BATCHES[0])


# -- plans -----------------------------------------------------------------------------------------------------


def test_a_plan_tells_its_orders():
    plan = make_plan(random_mlp(20, 16, 2), CPU, cpu.KERNELS)
    (group,) = plan.to_dict()["groups"]
    assert group["order"] == plan.groups[0].claim.order != ""
    assert json.loads(plan_to_json(plan))["groups"][0]["order"] == group["order"]


def test_layers_that_add_nothing_up_have_no_order():
    assert all(assert_one_order(sequential(TensorType(("B", 4)), [("s", Softmax(1))], {}), CPU).values())
    assert not any(assert_one_order(sequential(TensorType(("B", 4)), [("r", ReLU())], {}), CPU).values())


@pytest.mark.parametrize(("device", "precision"), [(CPU, "fp32"), (H200, "fp16")])
def test_a_plan_with_another_order_is_refused(device, precision):
    plan = make_plan(random_mlp(20, 16, 2), device, kernels_for(device), Job(precision))
    told = json.loads(plan_to_json(plan))
    told["groups"][0]["order"] = "k from the last to the first"
    with pytest.raises(PlanError, match="no kernel runs 'fc1' as planned") as error:
        plan_from_json(json.dumps(told), array_weights(plan.network), kernels_for(device))
    assert "k from the last to the first" in error.value.got
    assert "the bits of the results may change" in error.value.hint
