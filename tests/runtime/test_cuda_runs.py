"""What a training run launches on a GPU, and when."""

from __future__ import annotations

import pytest

from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.kernels.cuda.train.large_batch.launches import GRAPH_STEPS, LargeBatchLowering
from onchip.runtime.cuda.gpu import Event, Gpu
from onchip.runtime.cuda.launches import Graph
from onchip.runtime.cuda.runs import JointLaunches
from onchip.train import training_run
from onchip.train.loop import fit
from training_cases import assert_same_bits, case, train_only_by


@needs_gxx
def test_orders_go_beside_the_steps_before_and_their_own_wait_for_them(monkeypatch):
    emulate_device(monkeypatch)
    log = []

    def logged(owner, name, what):
        call = getattr(owner, name)

        def told(self, *args):
            log.extend(what(*args))
            return call(self, *args)

        monkeypatch.setattr(owner, name, told)

    monkeypatch.setattr(training_run, "REPORT_SECONDS", 60.0)  # whole epochs, however busy the machine is
    net, x, y, training = case(8, 3, n=40, batch_size=16, lr=0.1)
    order_bytes = 8 * len(x)
    logged(Gpu, "write", lambda _, a, stream, *__: [("order", stream)] if a.nbytes == order_bytes else [])
    logged(Event, "record", lambda stream: [("recorded", stream)])
    logged(Event, "block_stream", lambda stream: [("held", stream)])
    logged(Graph, "launch", lambda stream: [("steps", stream)])
    fit(net, x, y, device="cuda", epochs=3, **training)
    sent = [i for i, (what, _) in enumerate(log) if what == "order"]
    assert len(sent) == 3
    for at in sent:
        copies = log[at][1]
        launched = next(stream for what, stream in log[at:] if what == "steps")
        assert log[at + 1 : at + 3] == [("recorded", copies), ("held", launched)]
        assert copies != launched


@needs_gxx
@pytest.mark.parametrize("batch", [10, 60])
def test_epochs_of_whole_batches_are_trained_on_as_one_with_the_same_bits(batch, monkeypatch):
    emulate_device(monkeypatch)
    train_only_by(monkeypatch, "mlp_train")
    net, x, y, _ = case(8, 7, 3, n=60)
    training = {"batch_size": batch, "lr": 0.1, "momentum": 0.5, "epochs": 12, "device": "cuda", "seed": 3}
    monkeypatch.setattr(training_run, "REPORT_SECONDS", 1e9)  # as many epochs at a time as may be
    sizes = []
    launch_all = LargeBatchLowering.steps
    monkeypatch.setattr(LargeBatchLowering, "steps", lambda self, count: sizes.append(count) or launch_all(self, count))
    one = fit(net, x, y, **training)
    assert max(sizes) > 60 // batch
    monkeypatch.setattr("onchip.runtime.cuda.runs.joined_epochs", lambda rows, batch: 1)
    assert_same_bits(one, fit(net, x, y, **training))


@needs_gxx
def test_steps_of_any_number_are_few_sizes_of_graphs_and_an_epoch_s_rest_is_one(monkeypatch):
    emulate_device(monkeypatch)
    train_only_by(monkeypatch, "mlp_train")
    made = []
    begin = JointLaunches.__init__
    monkeypatch.setattr(JointLaunches, "__init__", lambda self, *args: made.append(self) or begin(self, *args))
    net, x, y, _ = case(8, 3, n=107)
    fit(net, x, y, device="cuda", epochs=1, batch_size=1, lr=0.1)
    (launches,) = made
    assert launches.sizes_of(107) == [GRAPH_STEPS, 107 - GRAPH_STEPS]
    every = [launches.sizes_of(count) for count in range(1, 300)]
    assert [sum(sizes) for sizes in every] == list(range(1, 300))
    assert len({size for sizes in every for size in sizes}) <= 8
