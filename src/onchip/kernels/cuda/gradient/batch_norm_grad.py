"""The gradients of batch norms in training: host side of gradient/batch_norm_grad.cu."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_double, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.batch_norm_run import find_gradients
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Memory, Output, Scratch, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.gradient.batch_sum import accumulated
from onchip.kernels.cuda.gradient.channels import BUDGET, SUMS_ORDER, Channels, in_layout
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import BatchNormGrad, Mask, WeightGrad
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import has_channels
from onchip.plan.plan import values_read, values_written

SOURCE = Path(__file__).with_suffix(".cu")
ROLES = ("mean", "var", "weight", "d_weight", "d_bias")


class BatchNormGradStruct(CStruct):
    source, c_name = SOURCE, "BatchNormGrad<float, float, float>"
    _fields_ = (
        ("partial", c_void_p), *((role, c_void_p) for role in ROLES), ("new_d_weight", c_void_p),
        ("new_d_bias", c_void_p), ("eps", c_double),
    )  # fmt: skip


@dataclass(frozen=True)
class BatchNormGradLowering:
    """channel_sums(dy, x, mask, partial, slices); batch_norm_grad(x, dy, mask, dx, norm, slices)"""

    channels: Channels
    inputs: tuple[str, ...]  # what each is: "x", "dy" or "mask"
    outputs: tuple[str, ...]  # "dx", "new_d_weight" or "new_d_bias"
    roles: tuple[str, ...]  # of the weights
    eps: float
    sum_dtypes: tuple[str, str] = ("float32", "float32")  # of new_d_weight and new_d_bias

    def at(self, B: int) -> Steps:
        if not B * self.channels.C * self.channels.plane:
            return Steps(())
        weights: dict[str, Memory | Int64] = {role: Weight(role) for role in self.roles}
        given: dict[str, Memory | Int64] = {name: Input(i) for i, name in enumerate(self.inputs)}
        made: dict[str, Memory | Int64] = {name: Output(i) for i, name in enumerate(self.outputs)}
        x, dy, mask = (given.get(name, NOTHING) for name in ("x", "dy", "mask"))
        has_sums = "d_weight" not in weights
        norm = BatchNormGradStruct.of(
            partial=Scratch(0) if has_sums else NOTHING, **{role: weights.get(role, NOTHING) for role in ROLES},
            **{name: made.get(name, NOTHING) for name in ("new_d_weight", "new_d_bias")}, eps=self.eps,
        )  # fmt: skip
        types = ", ".join((self.channels.covered(B), *(FLOATS[dtype] for dtype in self.sum_dtypes)))
        launch = KernelLaunch(
            Program(SOURCE, f"batch_norm_grad<{types}, {str('mask' in given).lower()}>"),
            self.channels.config(B, slices=None if "dx" in made else 1),
            (x, dy, mask, made.get("dx", NOTHING), norm, self.channels.struct(B)), BUDGET,
        )  # fmt: skip
        if not has_sums:
            return Steps((launch,))
        return Steps((self.channels.sums(SOURCE, B, dy, x, mask), launch), self.channels.scratch_bytes(B))


class BatchNormGradKernel(OneDtypeKernel):
    """The gradients of a batch norm's weights, with that of x that follows and the Mask before: a ReLU's gradient."""

    name = "batch_norm_grad"
    writes_other_dtypes = True
    layers = (WeightGrad, BatchNormGrad, Mask)
    order = SUMS_ORDER

    def applies(self, net: Network, start: int) -> bool:
        return find_gradients(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        run = find_gradients(net, start)
        assert run is not None
        x, norm = net.types[run.norm.inputs[0]], run.norm
        if why := Channels.of(x, False).why_not():
            yield Refusal(self.name, norm.name, why)
            return
        nodes = [net.by_name[name] for name in run.nodes]
        roles = ["mean", "var", *(["weight"] if run.dx else []), *([] if run.sums else ["d_weight", "d_bias"])]
        shape, dtype = x.row_shape[:1], x.dtype
        recipes = {role: Recipe.of(as_is, (nodes[-1].weights[role],), shape, accumulated(dtype)) for role in roles}
        of_sums = {kind: net.types[name].dtype for name, kind in run.sums.items()}
        sum_dtypes = of_sums.get("new_d_weight", dtype), of_sums.get("new_d_bias", dtype)
        passes = bool(run.sums) * (2 + len(run.mask)) + len(run.dx) * (3 + len(run.mask))
        claim = self.claim(
            net, norm, None, nodes=run.nodes, label=f"{self.name}<{run.label}>",
            cost=Cost(
                sum(map(net.row_flop, nodes)), passes * x.row_bytes, recipe_bytes(recipes),
                launches=1 + bool(run.sums), precision="fp32",
            ),
            why="one pass for all sums, one for dx" if run.sums and run.dx else "single layer", recipes=recipes,
        )  # fmt: skip
        inputs = tuple(run.operands[name] for name in values_read(net, claim))
        outputs = tuple(run.sums.get(name, "dx") for name in values_written(net, claim.nodes))
        for is_nhwc in (False, True) if has_channels(x) else (False,):
            lowering = BatchNormGradLowering(
                Channels.of(x, is_nhwc), inputs, outputs, tuple(roles), run.eps, sum_dtypes
            )
            yield in_layout(replace(claim, facts=lowering), net, is_nhwc)


def _instance(
    name: str, C: int, plane: int, is_nhwc: bool = False, launch: int = 1, inputs: tuple[str, ...] = ("x", "dy"),
    dtype: str = "float32",
) -> Instance:  # fmt: skip
    outputs, roles = ("new_d_weight", "new_d_bias", "dx"), ("mean", "var", "weight")
    lowering = BatchNormGradLowering(Channels(C, plane, is_nhwc, dtype), inputs, outputs, roles, 1e-5, (dtype, dtype))
    return instance(name, lowering, launch=launch)


MASKED = ("x", "dy", "mask")
INSTANCES = (
    _instance("pixels", 16, 1024), _instance("odd pixels", 16, 49), _instance("NHWC", 16, 1024, True),
    _instance("odd channels, NHWC", 15, 49, True), _instance("sums of pixels", 16, 1024, launch=0),
    _instance("sums of odd pixels", 16, 49, launch=0), _instance("sums, NHWC", 16, 1024, True, launch=0),
    _instance("sums of odd channels", 15, 1, launch=0), _instance("masked pixels", 16, 1024, inputs=MASKED),
    _instance("masked, NHWC", 16, 1024, True, inputs=MASKED),
    _instance("sums of masked pixels", 16, 1024, launch=0, inputs=MASKED),
    _instance("masked sums, NHWC", 16, 1024, True, launch=0, inputs=MASKED),
    _instance("float16", 16, 1024, dtype="float16"), _instance("bfloat16, NHWC", 16, 1024, True, dtype="bfloat16"),
    _instance("doubles", 16, 1024, dtype="float64"), _instance("doubles, NHWC", 16, 1024, True, dtype="float64"),
    _instance("sums of doubles", 16, 1024, launch=0, dtype="float64"),
    _instance("masked doubles", 16, 1024, inputs=MASKED, dtype="float64"),
)  # fmt: skip
