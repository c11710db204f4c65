"""Batch norms in training, by the statistics of the batch or by changing ones: host side of gradient/batch_norm.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ctypes import c_double, c_uint32, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.batch_norm import BATCH_NORMS, is_changing_norm
from onchip.kernels.chain import with_activation
from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Memory, Output, Scratch, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.gradient.batch_sum import accumulated
from onchip.kernels.cuda.gradient.channels import BUDGET, SUMS_ORDER, Channels, in_layout
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchMean, BatchVariance, ReLU
from onchip.network.recipe import Recipe, as_is, value_of
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import has_channels
from onchip.plan.plan import values_written

SOURCE = Path(__file__).with_suffix(".cu")


class BatchNormStruct(CStruct):
    source, c_name = SOURCE, "BatchNorm<float>"
    _fields_ = (
        ("partial", c_void_p), ("mean", c_void_p), ("var", c_void_p), ("weight", c_void_p), ("bias", c_void_p),
        ("new_mean", c_void_p), ("new_var", c_void_p), ("unbiased_var", c_void_p), ("eps", c_double),
        ("is_rectified", c_uint32),
    )  # fmt: skip


@dataclass(frozen=True)
class BatchNormLowering:
    """channel_sums(x, null, null, partial, slices); batch_norm(x, y, norm, slices)"""

    channels: Channels
    outputs: tuple[str, ...]  # what each is: "y", "new_mean", "new_var" or "unbiased_var"
    roles: tuple[str, ...] = ()  # of the weights
    eps: float = 0.0
    has_statistics: bool = False  # of the batch; else mean and var are weights
    is_rectified: bool = False

    def at(self, B: int) -> Steps:
        if not B * self.channels.C * self.channels.plane:
            return Steps(())
        weights: dict[str, Memory | Int64] = {role: Weight(role) for role in self.roles}
        made: dict[str, Memory | Int64] = {name: Output(i) for i, name in enumerate(self.outputs)}
        norm = BatchNormStruct.of(
            partial=Scratch(0) if self.has_statistics else NOTHING,
            **{role: weights.get(role, NOTHING) for role in ("mean", "var", "weight", "bias")},
            **{name: made.get(name, NOTHING) for name in ("new_mean", "new_var", "unbiased_var")},
            eps=self.eps, is_rectified=self.is_rectified,
        )  # fmt: skip
        config = self.channels.config(B, slices=None if "y" in made else 1)
        launch = KernelLaunch(
            Program(SOURCE, f"batch_norm<{self.channels.covered(B)}>"), config,
            (Input(0), made.get("y", NOTHING), norm, self.channels.struct(B)), BUDGET,
        )  # fmt: skip
        if not self.has_statistics:
            return Steps((launch,))
        return Steps((self.channels.sums(SOURCE, B, Input(0)), launch), self.channels.scratch_bytes(B))


class BatchNormKernel(OneDtypeKernel):
    """The statistics of a batch and the norm by them that follows; and norms by other weights that change."""

    name = "batch_norm"
    layers = (BatchMean, *BATCH_NORMS)
    order = SUMS_ORDER

    def applies(self, net: Network, start: int) -> bool:
        return isinstance(net.nodes[start].layer, BatchMean) or is_changing_norm(net, net.nodes[start])

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        first, statistics = net.nodes[start], _statistics(net, start)
        norm = _norm(net, start + len(statistics), statistics)
        nodes = (*map(net.by_name.__getitem__, statistics), *norm)
        x, recipes, eps = net.types[first.inputs[0]], dict[str, Recipe](), 0.0
        if why := Channels.of(x, False).why_not():
            yield Refusal(self.name, first.name, why)
            return
        if norm:
            eps = norm[0].layer.attributes()["eps"]
            roles = [role for role in norm[0].weights if not (statistics and role in ("mean", "var"))]
            shape, dtype = x.row_shape[:1], accumulated(x.dtype)
            recipes = {role: Recipe.of(as_is, (norm[0].weights[role],), shape, dtype) for role in roles}
        kinds = ",".join(dict.fromkeys(node.layer.kind for node in nodes))
        claim = self.claim(
            net, first, None, nodes=tuple(node.name for node in nodes), label=f"{self.name}<{kinds}>",
            cost=Cost(
                sum(map(net.row_flop, nodes)), (bool(statistics) + 2 * bool(norm)) * x.row_bytes,
                recipe_bytes(recipes), launches=1 + bool(statistics), precision="fp32",
            ),
            why="one pass for all sums, one for y" if statistics and norm else "single layer", recipes=recipes,
        )  # fmt: skip
        outputs = tuple(statistics.get(name, "y") for name in values_written(net, claim.nodes))
        for is_nhwc in (False, True) if has_channels(x) else (False,):
            lowering = BatchNormLowering(
                Channels.of(x, is_nhwc), outputs, tuple(recipes), eps, bool(statistics),
                isinstance(nodes[-1].layer, ReLU),
            )  # fmt: skip
            yield in_layout(replace(claim, facts=lowering), net, is_nhwc)


def _statistics(net: Network, start: int) -> dict[str, str]:
    """A BatchMean with the BatchVariances after it around that mean, each once: what each is, by name."""
    mean = net.nodes[start]
    if not isinstance(mean.layer, BatchMean):
        return {}
    found = {mean.name: "new_mean"}
    for node in net.nodes_from(start + 1):
        layer = node.layer
        if not isinstance(layer, BatchVariance) or node.inputs != mean.inputs or _value(net, node, "mean") != mean.name:
            break
        kind = "unbiased_var" if layer.is_unbiased else "new_var"
        if kind in found.values():
            break
        found[node.name] = kind
    return found


def _norm(net: Network, start: int, statistics: Mapping[str, str]) -> tuple[Node, ...]:
    """The norm at `start`, by these statistics if there are any, with the ReLU after it."""
    node = next(net.nodes_from(start), None)
    if node is None or not isinstance(node.layer, BATCH_NORMS):
        return ()
    if names := {kind: name for name, kind in statistics.items()}:
        by_batch = all(_value(net, node, role) == names.get(f"new_{role}") for role in ("mean", "var"))
        if not by_batch or node.inputs != net.by_name[names["new_mean"]].inputs:
            return ()
    return with_activation(net, start, (ReLU,))


def _value(net: Network, node: Node, role: str) -> str:
    """The value of the network that a weight is; "" for another weight."""
    return value_of(net.weights[node.weights[role]])


def _instance(
    name: str, C: int, plane: int, is_nhwc: bool = False, launch: int = 1, dtype: str = "float32"
) -> Instance:
    outputs = ("new_mean", "new_var", "unbiased_var", "y")
    lowering = BatchNormLowering(Channels(C, plane, is_nhwc, dtype), outputs, ("weight", "bias"), 1e-5, True, True)
    return instance(name, lowering, launch=launch)


INSTANCES = (
    _instance("pixels", 16, 1024), _instance("odd pixels", 16, 49), _instance("NHWC", 16, 1024, True),
    _instance("odd channels, NHWC", 15, 49, True), _instance("many pixels", 3, 1 << 22),
    _instance("sums of pixels", 16, 1024, launch=0), _instance("sums of odd pixels", 16, 49, launch=0),
    _instance("sums, NHWC", 16, 1024, True, launch=0), _instance("sums of odd channels", 15, 1, launch=0),
    _instance("float16", 16, 1024, dtype="float16"), _instance("bfloat16, NHWC", 16, 1024, True, dtype="bfloat16"),
    _instance("doubles", 16, 1024, dtype="float64"), _instance("doubles, NHWC", 16, 1024, True, dtype="float64"),
    _instance("sums of doubles", 16, 1024, launch=0, dtype="float64"),
    _instance("sums, NHWC, float16", 16, 1024, True, 0, "float16"),
)  # fmt: skip
