"""Steps over a data set as networks: the reference computes what it computes with the rows as inputs."""

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.kernels import reference
from onchip.network.build import mlp, sequential
from onchip.network.layers import Linear
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.gradient.over_rows import LOG, ORDER, POSITION, begin_steps, over_rows
from onchip.plan.gradient.step import VALUES, training_step
from onchip.plan.gradient.training_form import DRAW
from onchip.plan.kernel import Job
from onchip.plan.plan_json import array_weights, plan_from_json, plan_to_json
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from row_steps import BATCHES, CASES, data_of, first_state, made, order_of, share, table_of
from takers import CPU


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("N", "batches"), BATCHES)
def test_the_same_steps(case, N, batches):
    step, whole, state = made(case, N, batches)
    data, order, table = data_of(step, N), order_of(N, batches), table_of(len(batches))
    alone, begin, losses = first_state(step), 0, []
    for number, B in enumerate(batches):
        alone[VALUES] = table[number]
        rows = tuple(array[order[begin : begin + B]] for array in data.values())
        loss, alone = reference.run_step(step, (*rows, share(B)), alone)
        alone |= {DRAW: alone[DRAW] + [0, 1]} if DRAW in alone else {}
        logged, state = reference.run_step(whole, share(B), state)
        assert logged == loss
        losses.append(loss[0])
        begin += B
    for name in alone.keys() - {VALUES}:
        assert np.array_equal(state[name], alone[name]), name
    assert np.array_equal(state[LOG], losses)
    assert state[POSITION].tolist() == [len(batches), sum(batches)]


def test_what_is_past_the_end_is_not_read_and_not_logged():
    _, whole, state = made("squares", 6, (4, 4))
    state[ORDER] = np.array([-7, 9, 2**40, 0, 1, 2, 3, -1])
    for _ in range(5):
        _, state = reference.run_step(whole, share(4), state)
    assert state[POSITION].tolist() == [5, 20]
    assert state[LOG].shape == (2,)
    assert np.isfinite(state[LOG]).all()


@pytest.mark.parametrize(
    ("order", "steps", "words"),
    [
        ([0, 6], 1, "0 to 5"),
        ([-1, 3], 1, "-1 to 3"),
        (range(6), 3, "step.table is too long"),
        ([0] * 7, 2, "step.order is too long"),
    ],
)
def test_a_beginning_that_does_not_fit_is_refused(order, steps, words):
    whole = over_rows(training_step(mlp(3, 2), TrainingStep("mse")), 6, 2)
    with pytest.raises(InputError, match=words):
        begin_steps(whole, np.array(order), table_of(steps))


def test_only_steps_over_some_rows():
    step = training_step(mlp(3, 2), TrainingStep("mse"))
    with pytest.raises(InputError, match="not a step"):
        over_rows(mlp(3, 2), 5, 1)
    with pytest.raises(InputError, match="no rows"):
        over_rows(step, 0, 1)
    with pytest.raises(InputError, match="not a step"):
        over_rows(over_rows(step, 5, 1), 5, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
def test_the_plan_is_the_same_from_its_json(case, device):
    _, whole, _ = made(case, 6, (3, 3))
    plan = make_plan(whole, device, kernels_for(device), Job(batch=3))
    twin = plan_from_json(plan_to_json(plan), array_weights(plan.network), kernels_for(device))
    assert str(twin) == str(plan)
    assert twin.network.nodes == plan.network.nodes
    assert twin.network.state == plan.network.state
    assert [group.claim.facts for group in twin.groups][-1] == [group.claim.facts for group in plan.groups][-1]
    kernels = [group.claim.kernel for group in twin.groups]
    assert (kernels[0], kernels[-1]) == ("step_rows", "step_counters")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
def test_the_other_layers_run_as_without_a_data_set(case, device):
    step, whole, _ = made(case, 6, (3, 3))
    plans = [make_plan(net, device, kernels_for(device), Job(batch=3)) for net in (step, whole)]
    alone, groups = ([group.claim.label for group in plan.groups] for plan in plans)
    assert groups[1:-1] == alone


def test_a_network_with_a_value_called_loss():
    net = sequential(TensorType(("B", 3)), [("loss", Linear())], {"loss.weight": np.ones((2, 3), np.float32)})
    whole = over_rows(training_step(net, TrainingStep("mse")), 5, 2)
    assert whole.weight_type(LOG) == TensorType((2,))
    assert whole.by_name[f"{LOG}.new"].inputs == whole.outputs


def test_a_network_with_a_value_of_the_step_is_refused():
    net = sequential(TensorType(("B", 3)), [("step.ids", Linear())], {"step.ids.weight": np.ones((2, 3), np.float32)})
    with pytest.raises(InputError, match=r"is called 'step\.ids'"):
        over_rows(training_step(net, TrainingStep("mse")), 5, 2)
