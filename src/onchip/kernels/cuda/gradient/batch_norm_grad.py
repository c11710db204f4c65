"""The gradients of batch norms in training: host side of gradient/batch_norm_grad.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ctypes import c_double, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Memory, Output, Scratch, Weight
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.gradient.batch_norm import BATCH_NORMS
from onchip.kernels.cuda.gradient.channels import BUDGET, SUMS_ORDER, Channels, in_layout
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network, Node
from onchip.network.layers import BatchNormGrad, WeightGrad
from onchip.network.recipe import Recipe, as_is, value_of
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal
from onchip.plan.layout import has_channels
from onchip.plan.plan import values_read, values_written

SOURCE = Path(__file__).with_suffix(".cu")
ROLES = ("mean", "var", "weight", "d_weight", "d_bias")


class BatchNormGradStruct(CStruct):
    source, c_name = SOURCE, "BatchNormGrad"
    _fields_ = (
        ("partial", c_void_p), *((role, c_void_p) for role in ROLES), ("new_d_weight", c_void_p),
        ("new_d_bias", c_void_p), ("eps", c_double),
    )  # fmt: skip


@dataclass(frozen=True)
class BatchNormGradLowering:
    """channel_sums(dy, x, partial, slices); batch_norm_grad(x, dy, dx, norm, slices)"""

    channels: Channels
    x: int  # indices of the inputs
    dy: int
    outputs: tuple[str, ...]  # what each is: "dx", "new_d_weight" or "new_d_bias"
    roles: tuple[str, ...]  # of the weights
    eps: float

    def at(self, B: int) -> Steps:
        if not B * self.channels.C * self.channels.plane:
            return Steps(())
        weights: dict[str, Memory | Int64] = {role: Weight(role) for role in self.roles}
        made: dict[str, Memory | Int64] = {name: Output(i) for i, name in enumerate(self.outputs)}
        has_sums = "d_weight" in weights
        norm = BatchNormGradStruct.of(
            partial=NOTHING if has_sums else Scratch(0), **{role: weights.get(role, NOTHING) for role in ROLES},
            **{name: made.get(name, NOTHING) for name in ("new_d_weight", "new_d_bias")}, eps=self.eps,
        )  # fmt: skip
        launch = KernelLaunch(
            Program(SOURCE, f"batch_norm_grad<{self.channels.covered(B)}>"),
            self.channels.config(B, slices=None if "dx" in made else 1),
            (Input(self.x), Input(self.dy), made.get("dx", NOTHING), norm, self.channels.struct(B)), BUDGET,
        )  # fmt: skip
        if has_sums:
            return Steps((launch,))
        return Steps((self.channels.sums(SOURCE, B, self.dy, self.x), launch), self.channels.scratch_bytes(B))


class BatchNormGradKernel(CudaKernel):
    """The gradients of a batch norm's weights, with that of x that follows; or that of x alone."""

    name = "batch_norm_grad"
    layers = (WeightGrad, BatchNormGrad)
    dtypes = ("float32",)
    order = SUMS_ORDER

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return not isinstance(layer, WeightGrad) or isinstance(layer.of, BATCH_NORMS)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        first, sums = net.nodes[start], _sums(net, start)
        x, dy = net.types[first.inputs[0]], first.inputs[-1]
        dx = _dx(net, start + len(sums), sums)
        nodes = [*map(net.by_name.__getitem__, sums), *dx]
        if why := Channels.of(x, False).why_not():
            yield Refusal(self.name, first.name, why)
            return
        roles = ["mean", "var", *(["weight"] if dx else []), *([] if sums else ["d_weight", "d_bias"])]
        recipes = {role: Recipe.of(as_is, (nodes[-1].weights[role],), (x.row_shape[0],)) for role in roles}
        outputs = tuple(sums.get(name, "dx") for name in values_written(net, [node.name for node in nodes]))
        eps = (first.layer.of if isinstance(first.layer, WeightGrad) else first.layer).attributes()["eps"]
        claim = self.claim(
            net, first, None, nodes=tuple(node.name for node in nodes),
            label=f"{self.name}<{','.join([*sums.values(), *(['dx'] if dx else [])]).replace('new_', '')}>",
            cost=Cost(
                sum(map(net.row_flop, nodes)), (2 * bool(sums) + 3 * bool(dx)) * x.row_bytes, recipe_bytes(recipes),
                launches=1 + bool(sums), precision="fp32",
            ),
            why="one pass for all sums, one for dx" if sums and dx else "single layer", recipes=recipes,
        )  # fmt: skip
        for is_nhwc in (False, True) if has_channels(x) else (False,):
            read = values_read(net, claim)
            lowering = BatchNormGradLowering(
                Channels.of(x, is_nhwc), read.index(first.inputs[0]), read.index(dy), outputs, tuple(roles), eps
            )
            yield in_layout(replace(claim, facts=lowering), net, is_nhwc)


def _sums(net: Network, start: int) -> dict[str, str]:
    """The gradients of a norm's weights from `start` on, each once: what each is, by name."""
    first, found = net.nodes[start], dict[str, str]()
    for node in net.nodes_from(start):
        if not isinstance(node.layer, WeightGrad) or not isinstance(first.layer, WeightGrad):
            break
        is_same = node.layer.of == first.layer.of and node.inputs == first.inputs and node.weights == first.weights
        if not is_same or f"new_d_{node.layer.role}" in found.values():
            break
        found[node.name] = f"new_d_{node.layer.role}"
    return found


def _dx(net: Network, start: int, sums: Mapping[str, str]) -> tuple[Node, ...]:
    """The BatchNormGrad at `start`, by these sums if there are any."""
    node = next(net.nodes_from(start), None)
    if node is None or not isinstance(node.layer, BatchNormGrad):
        return ()
    names = {kind: name for name, kind in sums.items()}
    for role in ("d_weight", "d_bias") if sums else ():
        if value_of(net.weights[node.weights[role]]) != names.get(f"new_{role}"):
            return ()
    for sum_of in (net.by_name[name] for name in sums):
        same_values = (sum_of.inputs[0], sum_of.inputs[-1]) == node.inputs
        same_weights = all(sum_of.weights.get(role) == node.weights[role] for role in ("mean", "var", "weight"))
        if not same_values or not same_weights or sum_of.layer.attributes()["of"].eps != node.layer.eps:
            return ()
    return (node,)


def _instance(name: str, C: int, plane: int, is_nhwc: bool = False, launch: int = 1) -> Instance:
    outputs, roles = ("new_d_weight", "new_d_bias", "dx"), ("mean", "var", "weight")
    return instance(name, BatchNormGradLowering(Channels(C, plane, is_nhwc), 0, 1, outputs, roles, 1e-5), launch=launch)


INSTANCES = (
    _instance("pixels", 16, 1024), _instance("odd pixels", 16, 49), _instance("NHWC", 16, 1024, True),
    _instance("odd channels, NHWC", 15, 49, True), _instance("sums of pixels", 16, 1024, launch=0),
    _instance("sums of odd pixels", 16, 49, launch=0), _instance("sums, NHWC", 16, 1024, True, launch=0),
    _instance("sums of odd channels", 15, 1, launch=0),
)  # fmt: skip
