"""How a plan is displayed: as a line, a table, in few columns, in a notebook."""

import dataclasses

import pytest

from onchip.network.build import mlp
from onchip.network.training import TrainingStep
from onchip.plan.device import KNOWN
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.plan.step_info import steps_of
from onchip.runtime.placement import plan
from onchip.workloads import decode, faces


def test_repr_is_one_short_line():
    shown = repr(plan(decode.network(), "h200"))
    assert shown.startswith("Plan(decode on NVIDIA H200, fp32, infer, 1,024 rows: 1 group, estimate ")
    assert len(shown) < 200
    assert "\n" not in shown


def test_the_plan_of_a_step_says_that_it_trains():
    step = training_step(mlp(3, 2), TrainingStep("mse"))
    made = make_plan(step, KNOWN["h200"], [], Job(batch=8), whole=False)
    assert made.title.startswith("mlp on NVIDIA H200, fp32, train, mse, 8 rows")
    assert (made.to_dict()["job"], made.to_dict()["network"]) == ("train", "mlp")
    other = dataclasses.replace(step, trained=None)
    made = make_plan(other, KNOWN["h200"], [], Job(batch=8), whole=False)
    assert made.title.startswith("mlp, a step on NVIDIA H200, fp32, train, 8 rows")


def test_a_whole_step_is_shown_by_the_layers_that_it_trains():
    made = plan(training_step(mlp(784, 128, 10), TrainingStep("mse")), "h200")
    assert str(made).splitlines()[2].startswith("0      fc1..fc2  mlp_train")
    assert made.to_dict()["groups"][0]["layers"] == ["fc1", "relu1", "fc2"]
    assert [step.layers for step in steps_of(made, 64)] == [("fc1", "relu1", "fc2")]


def test_a_plan_that_cannot_run_says_so_in_its_first_line():
    made = make_plan(decode.network(), KNOWN["h200"], [], whole=False)
    assert made.without_kernel == tuple(node.name for node in made.network.nodes)
    why = f"runs fc1 and {len(made.network.nodes) - 1} more"
    assert str(made).splitlines()[0].endswith(f": cannot run, no kernel {why}")
    assert plan(decode.network(), "h200").without_kernel == ()


@pytest.mark.parametrize("width", [40, 80])
def test_in_few_columns_every_word_is_still_there(width):
    made = plan(faces.network(), "h200")
    shown = made.text(width)
    assert max(map(len, shown.splitlines())) <= width
    told = "".join(shown.split())
    for group in made.groups:
        assert "".join(group.claim.why.split()) in told
        assert "".join(group.claim.label.split()) in told


def test_where_there_is_room_it_is_a_table():
    made = plan(decode.network(), "h200")
    assert made.text(300) == str(made)


def test_a_notebook_shows_tables_of_what_it_says():
    made = plan(decode.network(), "h200")
    shown = made._repr_html_()
    assert shown.startswith("<p>decode on NVIDIA H200")
    assert "mlp_tensor_core&lt;72,64,64,4,ReLU&gt;" in shown


def test_a_precision_is_refused_where_a_kernel_applies():
    """Not at every layer: the convolution kernel that computes in 16 bits says nothing of an MLP."""
    refused = {(each.kernel, each.node): each.why for each in plan(decode.network(), "h200", Job()).refusals}
    assert refused["mlp_pair", "fc1"] == "computes in fp16, bf16, not fp32"
    assert not any(kernel == "conv_last_layer_sm90" for kernel, _ in refused)
