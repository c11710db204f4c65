"""A plan as JSON: what another process, now or later, needs to run the same kernels over the same weights.

{"version": 6, "device": {...}, "job": {...}, "network": {...}, "recipes": {"a+b.weight": {...}}, "state": {...},
 "groups": [{"kernel": "mlp_fused", "label": "mlp_fused<4,3>", "layers": ["a+b"], "order": "k in order"}],
 "rewrites": [...], "refusals": [...], "fold": "", "left_out": [...]}

The network of a plan, unlike that of a file, may have step layers, and state: {"fc.weight": "fc.weight.new"}. "trained"
is null, or what such a step trains: {"network": {...}, "how": {"loss": "mse", ...}, "decays": false, "frozen": []}. The
step is written again from it, and must have the same nodes. Weights that decay by name are {"fc.weight": 0.1}.

A group lists the values that it reads or writes in layouts other than ROWS ("reads", "writes"). A group without layers
converts a value from one layout to another.

The JSON records the choice, not its launch details: the kernel is queried for these again, and a different answer is an
error. Weights in arrays are stored elsewhere; derived weights are stored as recipes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

from onchip.errors import DeviceError, FormatError, OnchipError, PlanError
from onchip.formats.graph_json import graph_from_json, graph_to_json, parse_json
from onchip.network.graph import Network, TrainedStep
from onchip.network.layers import LAYERS, STEP_LAYERS
from onchip.network.reading import fields, name_of, real, show, whole
from onchip.network.recipe import Array, Recipe, Weight, reach
from onchip.network.training import TrainingStep
from onchip.plan.build_cost import recipe_rates_of
from onchip.plan.cover import answers, no_claim, plan_build_us
from onchip.plan.device import Device, Peak
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Claim, Converter, Job, Kernel, Refusal
from onchip.plan.layout import ROWS
from onchip.plan.plan import Plan, groups_of

VERSION = 6
# "module:function", and no module with side effects on import.
_OPERATION = re.compile(r"([a-z][a-z0-9_]*\.)*[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")


def plan_to_json(plan: Plan) -> str:
    return json.dumps({
        "version": VERSION,
        "device": _device_to_json(plan.device),
        "job": dataclasses.asdict(plan.job),
        "network": json.loads(graph_to_json(plan.network)),
        "recipes": json.loads(recipes_to_json(plan.network)),
        "state": dict(plan.network.state),
        "trained": _trained_to_json(plan.network.trained),
        "groups": [_group_to_json(group.claim) for group in plan.groups],
        "rewrites": plan.rewrites,
        "refusals": [dataclasses.asdict(refusal) for refusal in plan.refusals],
        "fold": plan.fold,
        "left_out": plan.left_out,
    })  # fmt: skip


def recipes_to_json(net: Network) -> str:
    """The derived weights, by name."""
    recipes = {name: weight for name, weight in sorted(_reached(net).items()) if isinstance(weight, Recipe)}
    return json.dumps({name: _recipe_to_json(recipe) for name, recipe in recipes.items()})


def plan_digest(plan: Plan) -> str:
    """A hash that is equal for plans that run the same kernels over weights of the same names and shapes."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()


def plan_record(plan: Plan) -> dict[str, Any]:
    """What planning the same network later needs to choose the same plan: the measured rates."""
    return {"kind": plan.device.kind, "device": _device_to_json(plan.device), "sha256": plan_digest(plan)}


def recorded_kind(record: Any) -> str:
    """The kind of device in a plan_record from a file; FormatError if that is not a plan_record."""
    fields(record, ("kind", "device", "sha256"), "its plan")
    if record["kind"] not in ("cpu", "cuda"):
        raise FormatError("unknown kind of device", got=name_of(record["kind"]), expected="cpu or cuda")
    return str(record["kind"])


def recorded_device(record: Any, here: Device) -> Device:
    """The device in a plan_record, which must be of the same kind as `here`; FormatError if it is not a device."""
    stored, like = record["device"], _device_to_json(here)
    fields(stored, tuple(like), "its device")
    # On a GPU these decide what a kernel can run; on a CPU they only affect speed.
    same = ("kind", "arch", "vector_bytes", *(("units", "fast_bytes") if here.kind == "cuda" else ()))
    if other := [name for name in same if stored[name] != like[name]]:
        got, expected = (f"{other[0]}: {show(device[other[0]])}" for device in (like, stored))
        raise DeviceError(
            "the run started on another kind of device", got=got, expected=expected,
            hint="resume it on that device, or start over without --resume",
        )  # fmt: skip
    _check_like(stored, like, "its device")
    return _device(stored)


def _check_like(stored: Any, like: Any, where: str) -> None:
    """FormatError unless a value from a file has the structure of `like`, with numbers within a factor of 1024."""
    if isinstance(like, dict):
        fields(stored, tuple(like), where)
        for name, value in like.items():
            _check_like(stored[name], value, f"{where}: {name}")
    elif isinstance(like, str):
        if not isinstance(stored, str):
            raise FormatError(f"{where} is not a string", got=name_of(stored), expected="a string")
    elif isinstance(like, int):
        whole(stored, where, min(like, 1), like << 10)
    elif not like / 1024 <= real(stored, where) <= like * 1024:
        raise FormatError(f"{where} is out of range", got=name_of(stored), expected=f"about {like:g}")


def array_weights(net: Network) -> dict[str, Array]:
    """The weights that a plan's JSON does not contain: those stored as arrays."""
    return {name: w for name, w in _reached(net).items() if not isinstance(w, Recipe)}


def _reached(net: Network) -> dict[str, Weight]:
    """The weights that the layers use, their sources, and the state, in the network's order."""
    used = (name for node in net.nodes for name in node.weights.values())
    reached = reach([*used, *net.state], net.weights)
    return {name: weight for name, weight in net.weights.items() if name in reached}


def plan_from_json(text: str, weights: Mapping[str, Array], kernels: Sequence[Kernel]) -> Plan:
    """The plan of this JSON over these weights; PlanError if its kernels would compute something else now.

    weights  array_weights of the plan's network
    kernels  of the plan's device
    """
    data = parse_json(text, "the plan")
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION or isinstance(version, bool):
        raise FormatError(
            "not a plan of this version", got=show(version), expected=f"version {VERSION}", hint="plan again"
        )
    assert isinstance(data, dict)
    try:
        device, job = _device(data["device"]), _job(data["job"])
        recipes = {name: _recipe_from_json(entry) for name, entry in data["recipes"].items()}
        TopologicalSorter({name: _names(recipe) for name, recipe in recipes.items()}).prepare()  # a cycle: ValueError
        state = {name: str(value) for name, value in data["state"].items()}
        net = graph_from_json(json.dumps(data["network"]), {**weights, **recipes}, LAYERS | STEP_LAYERS, state)
        if data["trained"] is not None:
            net = _trained_from_json(data["trained"], net)
        positions = {node.name: i for i, node in enumerate(net.nodes)}
        chosen = [_claim(net, positions, entry, device, job, kernels) for entry in data["groups"]]
        refusals = tuple(Refusal(**entry) for entry in data["refusals"])
        groups = groups_of(net, chosen)
        building = plan_build_us(net, groups, device, kernels)
        rewrites, fold, left_out = tuple(map(str, data["rewrites"])), str(data["fold"]), tuple(data["left_out"])
    except OnchipError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FormatError("not a plan", got=got, expected="what plan_to_json wrote", hint="plan again") from None
    if [name for claim in chosen for name in claim.nodes] != [node.name for node in net.nodes]:
        raise FormatError("not a plan", got="groups that omit layers", expected="every layer once, in order")
    return Plan(net, device, job, groups, rewrites, refusals, fold, left_out, building)


def _claim(
    net: Network, positions: Mapping[str, int], entry: Mapping[str, Any], device: Device, job: Job,
    kernels: Sequence[Kernel],
) -> Claim:  # fmt: skip
    """The claim of a group, as its kernel offers it now. `positions` maps node names to their indices."""
    name, layers = entry["kernel"], tuple(entry["layers"])
    start = positions.get(layers[0], -1) if layers else -1
    if not name and start >= 0:
        return no_claim(net, net.nodes[start], job)
    for kernel in kernels:
        if kernel.name != name or kernel.device_kind != device.kind:
            continue
        offered: Iterable[Claim | Refusal | None] = ()
        if start >= 0:
            offered = answers(kernel, net, start, device, job, recipe_rates_of(kernels, device))
        elif not layers and isinstance(kernel, Converter):
            ((value, wanted),), (layout,) = entry["writes"].items(), entry["reads"].values()
            offered = (kernel.conversion(net, value, layout, wanted, device, job),)
        for answer in offered:
            if isinstance(answer, Claim) and _group_to_json(answer) == {**entry, "layers": layers}:
                return answer
    raise PlanError(
        f"no kernel runs {show(layers[0] if layers else '')} as planned",
        got=show(f"{name}: {entry['label']}, {entry['order'] or 'no reduction'}"),
        expected="a kernel with the same label and reduction order",
        hint="plan again: the bits of the results may change",
    )  # fmt: skip


def _group_to_json(claim: Claim) -> dict[str, Any]:
    """The kernel, its layers, its reduction order, and the layouts of values that are not in ROWS."""
    group = {"kernel": claim.kernel, "label": claim.label, "layers": claim.nodes, "order": claim.order}
    reads = {value: use.layout for value, use in claim.reads.items() if use.layout != ROWS or not claim.nodes}
    return group | {key: found for key, found in (("reads", reads), ("writes", dict(claim.writes))) if found}


def _device_to_json(device: Device) -> dict[str, Any]:
    return _fields_of(device) | {"peak": _fields_of(device.peak)}


def _fields_of(of: Device | Peak) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)} | {"flops": dict(of.flops)}


def _device(entry: Mapping[str, Any]) -> Device:
    return Device(**{**entry, "peak": Peak(**entry["peak"])})


def _job(entry: Mapping[str, Any]) -> Job:
    return Job(**{**entry, "without": tuple(entry["without"])})


def _trained_to_json(trained: TrainedStep | None) -> dict[str, Any] | None:
    if trained is None:
        return None
    decays = dict(trained.decays) if isinstance(trained.decays, Mapping) else trained.decays
    return {
        "network": json.loads(graph_to_json(trained.network)), "how": dataclasses.asdict(trained.how),
        "decays": decays, "frozen": trained.frozen,
    }  # fmt: skip


def _trained_from_json(entry: Mapping[str, Any], net: Network) -> Network:
    """The network with what it trains; FormatError if its nodes are not those of such a step."""
    of = graph_from_json(json.dumps(entry["network"]), net.weights)
    of = of.replace(weights=_reached(of))  # without those that the step adds
    how, frozen = TrainingStep(**entry["how"]), frozenset(entry["frozen"])
    decays = entry["decays"] if isinstance(entry["decays"], dict) else bool(entry["decays"])
    step = training_step(of, how, decays=decays, trainable=lambda name: name not in frozen)
    if (step.inputs, step.nodes, step.outputs, step.state) != (net.inputs, net.nodes, net.outputs, net.state):
        raise FormatError("not a plan", got="nodes of another step", expected="those of the step that it describes")
    return dataclasses.replace(net, trained=step.trained)


def _recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    return {
        "op": recipe.op,
        "sources": [source if isinstance(source, str) else _recipe_to_json(source) for source in recipe.sources],
        "shape": recipe.shape, "dtype": recipe.dtype, "flop": recipe.flop, "attributes": dict(recipe.attributes),
    }  # fmt: skip


def _recipe_from_json(entry: Mapping[str, Any]) -> Recipe:
    if not _OPERATION.fullmatch(entry["op"]):
        raise FormatError("unknown recipe operation", got=show(entry["op"]), expected="module:function")
    sources = tuple(source if isinstance(source, str) else _recipe_from_json(source) for source in entry["sources"])
    attributes = tuple(sorted((name, _as_tuple(value)) for name, value in entry["attributes"].items()))
    return Recipe(entry["op"], sources, tuple(entry["shape"]), entry["dtype"], entry["flop"], attributes)


def _names(recipe: Recipe) -> list[str]:
    """The weights that it is derived from, by name."""
    return [n for source in recipe.sources for n in ([source] if isinstance(source, str) else _names(source))]


def _as_tuple(value: Any) -> Any:
    """Lists to tuples: JSON has no tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
