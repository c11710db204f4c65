"""Losses of training steps beside torch's: values and gradients, in float64 and by the kernel of the CPU."""

import numpy as np
import pytest

from onchip.network.build import sequential
from onchip.network.graph import Network
from onchip.network.layers import Mul
from onchip.network.training import LOSSES, TrainingStep
from onchip.network.types import TensorType
from onchip.plan.gradient.step import training_step
from step_cases import bind, run

B, C = 6, 7


def rows(loss):
    """Logits whose exponentials overflow, and differences of 0, of 1 and others."""
    rng = np.random.default_rng(0)
    y = (2 * rng.standard_normal((B, C))).astype(np.float32)
    if loss == "cross_entropy":
        return y, rng.integers(0, C, B)
    target = rng.integers(0, 2, (B, C)) if loss == "bce_with_logits" else y + rng.integers(-2, 3, (B, C))
    y[0] = 0, 100, -100, 100, -100, 0.5, 90
    target[0] = 0, 1, 0, 0, 1, 1, 1
    return y, target.astype(np.float32)


def loss_and_gradient(loss, y, target):
    """The first nodes of a step: its loss, and the gradient of the network's output."""
    net = sequential(TensorType(("B", C)), [("y", Mul())], {"y.constant": np.ones(C, np.float32)})
    step = training_step(net, TrainingStep(loss))
    nodes = [node for node in step.nodes if node.name in ("losses", "shared_losses", "loss", "y.grad")]
    inputs = {"y": TensorType(("B", C)), **{name: step.inputs[name] for name in ("target", "share")}}
    net = Network(inputs, tuple(nodes), ("loss", "y.grad"), {"s": np.zeros(1, np.float32)}, state={"s": ""})
    share = np.full(B, 1 if loss == "half_sse" else 1 / B, np.float32)
    got = run(bind(net, "loss", B), (y, target, share))
    return got["loss"], got["y.grad"], nodes[0].layer


@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_are_torch_s(loss):
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    y, target = rows(loss)

    def expected(dtype):
        z = torch.from_numpy(y).to(dtype).requires_grad_()
        given = torch.from_numpy(target) if loss == "cross_entropy" else torch.from_numpy(target).to(dtype)
        value = {
            "cross_entropy": f.cross_entropy, "half_sse": lambda z, t: 0.5 * torch.square(z - t).sum(),
            "mse": f.mse_loss, "bce_with_logits": f.binary_cross_entropy_with_logits, "mae": f.l1_loss,
            "huber": f.huber_loss,
        }[loss](z, given)  # fmt: skip
        value.backward()
        return value.item(), z.grad.numpy()

    value, gradient, layer = loss_and_gradient(loss, y, target)
    torch_value, torch_gradient = expected(torch.float32)
    assert value == pytest.approx(torch_value, rel=1e-6)
    np.testing.assert_allclose(gradient, torch_gradient, rtol=1e-6, atol=1e-8)

    torch_value, torch_gradient = expected(torch.float64)
    xs = (y.astype(np.float64), target if loss == "cross_entropy" else target.astype(np.float64))
    share = np.full(B, 1 if loss == "half_sse" else 1 / B)
    losses = layer.forward(xs, {})
    assert losses @ share == pytest.approx(torch_value, rel=1e-14)
    np.testing.assert_allclose(layer.backward(xs, {}, losses, share)[0][0], torch_gradient, rtol=1e-13, atol=1e-18)
