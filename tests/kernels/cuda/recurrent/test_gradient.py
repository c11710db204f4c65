"""Gradients of recurrent layers on an emulated GPU: every cell, direction and output, at odd sizes."""

import dataclasses

import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels.cuda.recurrent.gradient import GATES, RecurrentGradLowering
from onchip.network.layers import LSTM
from recurrent_gradients import CELLS, check, gradient


@needs_gxx
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layer", CELLS, ids=str)
def test_every_cell_and_direction(monkeypatch, layer, direction):
    gpu, layer = emulated_gpu(monkeypatch), dataclasses.replace(layer, direction=direction)
    for leading, H in (((3,), 5), ((2, 4), 19), ((1,), 1)):
        net = gradient(layer, 0, leading, H, has_extras=H == 19)
        xs, got = check(gpu, net, 5)
        (claim,) = claims_of(net, "recurrent_grad")
        assert run_claim(gpu, net, claim, *(x[3:4] for x in xs)).tobytes() == got[3:4].tobytes()


@needs_gxx
@pytest.mark.parametrize("layer", CELLS, ids=str)
def test_initial_states_and_last_outputs(monkeypatch, layer):
    gpu = emulated_gpu(monkeypatch)
    for output in ("sequence", "last", "cell") if isinstance(layer, LSTM) else ("sequence", "last"):
        changed = dataclasses.replace(layer, output=output, direction="bidirectional")
        for index in range(layer.states + 1):
            check(gpu, gradient(changed, index, (3,), 6, has_extras=output != "last"), 3)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("layer", CELLS[:3], ids=str)
def test_other_dtypes(monkeypatch, layer, dtype):
    check(emulated_gpu(monkeypatch), gradient(layer, 0, (2,), 7, True, dtype), 5)


@needs_gxx
@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("layer", CELLS[:3], ids=str)
def test_rows_per_block_and_rows_of_weights_on_chip(monkeypatch, layer, rows):
    """With many sequences a block has several; R is in shared memory, in L2, or in both."""
    gpu, net, results = emulated_gpu(monkeypatch), gradient(layer, 0, (2,), 67), []
    for share in (0.0, 0.5, 1.0):

        def change(lowering, share=share):
            most = lowering.shared_bytes(rows) - lowering.state_bytes(rows)
            limit = lowering.state_bytes(rows) + int(share * most)
            lowering = dataclasses.replace(lowering, units=1, shared_limit=limit)
            assert lowering.kept_for(rows) == int(share * 67 / lowering.parts) or share == 1
            return lowering

        results.append(check(gpu, net, rows + 1, change)[1])
    assert len({result.tobytes() for result in results}) == 1


@needs_gxx
@pytest.mark.parametrize("B", [1, 33, 257])
def test_batches(monkeypatch, B):
    check(emulated_gpu(monkeypatch), gradient(LSTM("bidirectional"), 0, (2,), 3), B)


def test_shared_memory_and_threads():
    for cell in GATES:
        for H in (1, 31, 33, 100, 128, 200, 512, 1024, 1500, 8000):
            lowering = RecurrentGradLowering(
                cell, "float32", (0, 1, 2, 3), 1, 9, 1, H, False, "sequence", 0, False, 132, 232_448
            )
            config = lowering.at(1 << 16).launches[0].config
            assert config.block[0] == lowering.lanes * lowering.parts <= 1024
            assert config.shared_bytes <= 232_448
    assert lowering.at(0).launches == ()
