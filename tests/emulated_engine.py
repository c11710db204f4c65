"""Claims of CUDA kernels on an emulated GPU: bound, and run where NumPy's arrays lie."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from emulated_cuda import emulated_gpu
from onchip.kernels import cuda
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.mlp import tensor_core as mlp_tensor_core
from onchip.network.graph import Network, Node
from onchip.network.layers import Layer
from onchip.network.recipe import materialise
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Claim, Job
from onchip.plan.layout import ROWS, stored_type
from onchip.plan.plan import values_read, values_written
from onchip.runtime.cuda import devices
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.gpu import Gpu


def one_layer(layer: Layer, *given: TensorType, weights: dict[str, np.ndarray] | None = None) -> Network:
    """A network of one layer."""
    inputs = {f"x{i}": each for i, each in enumerate(given)}
    roles = {role: role for role in weights or {}}
    return Network(inputs, (Node("y", layer, tuple(inputs), roles),), ("y",), weights or {})


def claims_of(net: Network, kernel: str, precision: str = "fp32", start: int = 0) -> list[Claim]:
    """Every claim of a kernel that begins at a node."""
    found = (answer for k in KERNELS if k.name == kernel for answer in k.claims(net, start, H200, Job(precision)))
    return [answer for answer in found if isinstance(answer, Claim)]


def run_claim(gpu: Gpu, net: Network, claim: Claim, *xs: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
    """What a claim makes of the values that it reads; those that it wants in another layout are given so. Of several
    values that it writes, a tuple."""
    inputs = [  # copies begin at a multiple of 16 bytes, as every kernel may count on
        np.array(x if claim.layout_read(name) == ROWS else np.moveaxis(x, 1, -1), order="C")
        for name, x in zip(values_read(net, claim), xs, strict=True)
    ]
    B, made = len(xs[0]), dict[str, np.ndarray]()
    for name in values_written(net, claim.nodes):
        kind = stored_type(net.types[name], claim.writes.get(name, ROWS))
        made[name] = np.full((kind.rows(B), *kind.row_shape), 77, numpy_dtype(kind.dtype))
    weights = {name: gpu.upload(materialise(recipe, net.weights)) for name, recipe in claim.recipes.items()}
    steps = BoundSteps(gpu, claim.facts.at(B), weights)
    scratch = np.full(steps.scratch_bytes + 16, 0xCD, np.uint8)
    at = -(-scratch.ctypes.data // 16) * 16
    steps.enqueue([x.ctypes.data for x in inputs], [y.ctypes.data for y in made.values()], at, gpu.stream)
    ys = tuple(y if claim.writes.get(name, ROWS) == ROWS else np.moveaxis(y, -1, 1) for name, y in made.items())
    return ys if len(ys) > 1 else ys[0]


def as_of_many(claim: Claim) -> Claim:
    """A claim of windows with the kernel of many rows, whatever the number: threads make several outputs."""
    windows = dataclasses.replace(claim.facts.windows, units=0)
    return dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, windows=windows))


def emulate_device(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """An emulated GPU that everybody finds as device "cuda", with the kernels that can be emulated: those with sizes
    at run time."""
    monkeypatch.setattr(devices, "probe", lambda: ([H200], ""))
    monkeypatch.setattr(
        mlp_tensor_core, "make_lowering", lambda *_: "it is not emulated"
    )  # then a plain product takes it
    left_out = (
        "mlp_train_resident",
        "mlp_train_layer_parallel",
        "mlp_tensor_core",
        "mlp_fused",
        "gemm_sm90",
        "conv_sm90",
    )
    monkeypatch.setattr(cuda, "KERNELS", tuple(k for k in KERNELS if k.name not in left_out))
    return emulated_gpu(monkeypatch)
