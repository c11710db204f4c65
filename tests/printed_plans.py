"""The printed plans of training steps, as files: `python tests/printed_plans.py` writes them again.

Widths are multiples of all vector lengths, so that plans are the same on every CPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onchip.network.build import mlp
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNorm2d, Conv2d, Dropout, Linear, MaxPool2d, ReLU, Reshape
from onchip.network.training import TrainingStep
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.gradient.over_rows import over_rows
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from takers import CPU
from training_steps import by_layers

FOLDER = Path(__file__).parent / "plan" / "printed"
DEVICES = {"cpu": CPU, "h200": H200}


def image_network() -> Network:
    """16x16x3 images, a convolution with a norm of the batch, a pool, a dropout: 16 classes."""
    norm = {role: f"norm.{role}" for role in ("weight", "bias", "mean", "var")}
    nodes = (
        Node("conv", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "conv.weight"}),
        Node("norm", BatchNorm2d(), ("conv",), norm),
        Node("relu", ReLU(), ("norm",)),
        Node("pool", MaxPool2d((2, 2), (2, 2)), ("relu",)),
        Node("flat", Reshape(), ("pool",)),
        Node("drop", Dropout(0.5), ("flat",)),
        Node("fc", Linear(), ("drop",), {"weight": "fc.weight", "bias": "fc.bias"}),
    )
    shapes = {"conv.weight": (16, 3, 3, 3), "fc.weight": (16, 1024), "fc.bias": (16,)}
    shapes |= dict.fromkeys(norm.values(), (16,))
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return Network({"x": TensorType(("B", 3, 16, 16))}, nodes, ("fc",), weights, "images")


def printed() -> dict[str, str]:
    """The plans, by the name of their file."""
    adam = training_step(mlp(20, 32, 16), TrainingStep("cross_entropy", "adam", clip_norm=1.0), decays=True)
    images = training_step(image_network(), TrainingStep("cross_entropy", "momentum"))
    steps = {"mlp": by_layers(adam), "whole": adam, "images": images, "rows": over_rows(images, 50_000, 782)}
    return {
        f"{name}.{device.kind}.txt": f"{make_plan(step, device, kernels_for(device), Job(batch=64), whole=False)}\n"
        for name, step in steps.items()
        for device in DEVICES.values()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in printed().items():
        (FOLDER / name).write_text(text)
