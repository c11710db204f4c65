"""A plan as JSON: what another process, now or later, needs to run the same kernels over the same weights.

{"version": 3, "device": {...}, "job": {...}, "network": {...}, "recipes": {"a+b.weight": {...}},
 "groups": [{"kernel": "mlp_fused", "label": "mlp_fused<4,3>", "layers": ["a+b"], "order": "k in order"}],
 "rewrites": [...], "refusals": [...], "fold": "", "left_out": [...]}

A group lists the values that it reads or writes in layouts other than ROWS ("reads", "writes"). A group without layers
converts a value from one layout to another.

The JSON records the choice, not its launch details: the kernel is queried for these again, and a different answer is an
error. Weights given as arrays are stored elsewhere; derived weights are stored as recipes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onchip.errors import DeviceError, FormatError, OnchipError, PlanError
from onchip.formats.graph_json import graph_from_json, graph_to_json, parse_json
from onchip.network.graph import Network
from onchip.network.reading import fields, name_of, real, show, whole
from onchip.network.recipe import Array, Recipe, Weight, reach
from onchip.plan.cover import building_us, no_claim
from onchip.plan.device import Device, Peak
from onchip.plan.kernel import Claim, Converter, Job, Kernel, Refusal
from onchip.plan.layout import ROWS
from onchip.plan.plan import Plan, groups_of

VERSION = 4
# "module:function", and no module with side effects on import.
_OPERATION = re.compile(r"([a-z][a-z0-9_]*\.)*[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")


def plan_to_json(plan: Plan) -> str:
    return json.dumps({
        "version": VERSION,
        "device": _device_to_json(plan.device),
        "job": dataclasses.asdict(plan.job),
        "network": json.loads(graph_to_json(plan.network)),
        "recipes": json.loads(recipes_to_json(plan.network)),
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
    """The same for plans that run the same kernels over weights of the same names and shapes."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()


def plan_record(plan: Plan) -> dict[str, Any]:
    """What planning needs to choose the same plan for the same network later: the measured rates."""
    return {"kind": plan.device.kind, "device": _device_to_json(plan.device), "sha256": plan_digest(plan)}


def recorded_kind(record: Any) -> str:
    """The kind of device in a plan_record read from a file; FormatError if it is no such record."""
    fields(record, ("kind", "device", "sha256"), "its plan")
    if record["kind"] not in ("cpu", "cuda"):
        raise FormatError("the kind of its device does not fit", got=name_of(record["kind"]), expected="cpu or cuda")
    return str(record["kind"])


def recorded_device(record: Any, here: Device) -> Device:
    """The device in a plan_record, which must be of the same kind as `here`; FormatError if it is no device."""
    told, like = record["device"], _device_to_json(here)
    fields(told, tuple(like), "its device")
    # On a GPU these decide what a kernel can run; on a CPU they only affect speed.
    same = ("kind", "arch", "vector_bytes", *(("units", "fast_bytes") if here.kind == "cuda" else ()))
    if other := [name for name in same if told[name] != like[name]]:
        got, expected = (f"{other[0]}: {show(device[other[0]])}" for device in (like, told))
        raise DeviceError(
            "the run began on another kind of device", got=got, expected=expected,
            hint="resume it there, or no --resume to begin anew",
        )  # fmt: skip
    _check_like(told, like, "its device")
    return _device(told)


def _check_like(told: Any, like: Any, where: str) -> None:
    """FormatError unless a value from a file has the form of `like`, and a number is within a factor of 1024 of it."""
    if isinstance(like, dict):
        fields(told, tuple(like), where)
        for name, value in like.items():
            _check_like(told[name], value, f"{where}: {name}")
    elif isinstance(like, str):
        if not isinstance(told, str):
            raise FormatError(f"{where} does not fit", got=name_of(told), expected="a text")
    elif isinstance(like, int):
        whole(told, where, min(like, 1), like << 10)
    elif not like / 1024 <= real(told, where) <= like * 1024:
        raise FormatError(f"{where} does not fit", got=name_of(told), expected=f"about {like:g}")


def given_weights(net: Network) -> dict[str, Array]:
    """The weights that a plan's JSON does not hold: those given as arrays."""
    return {name: w for name, w in _reached(net).items() if not isinstance(w, Recipe)}


def _reached(net: Network) -> dict[str, Weight]:
    """The weights that the layers use, and their sources, in the network's order."""
    reached = reach([name for node in net.nodes for name in node.weights.values()], net.weights)
    return {name: weight for name, weight in net.weights.items() if name in reached}


def plan_from_json(text: str, weights: Mapping[str, Array], kernels: Sequence[Kernel]) -> Plan:
    """The plan of this JSON over these weights; PlanError if its kernels would not do the same now.

    weights  given_weights of the plan's network
    kernels  of the plan's device
    """
    told = parse_json(text, "the plan")
    version = told.get("version") if isinstance(told, dict) else None
    if version != VERSION or isinstance(version, bool):
        raise FormatError(
            "not a plan of this version", got=show(version), expected=f"version {VERSION}", hint="make the plan again"
        )
    assert isinstance(told, dict)
    try:
        device, job = _device(told["device"]), _job(told["job"])
        recipes = {name: _recipe_from_json(entry) for name, entry in told["recipes"].items()}
        net = graph_from_json(json.dumps(told["network"]), {**weights, **recipes})
        places = {node.name: i for i, node in enumerate(net.nodes)}
        chosen = [_claim(net, places, entry, device, job, kernels) for entry in told["groups"]]
        refusals = tuple(Refusal(**entry) for entry in told["refusals"])
        groups = groups_of(net, chosen)
        building = building_us(net, groups, device, kernels)
        rewrites, fold, left_out = tuple(map(str, told["rewrites"])), str(told["fold"]), tuple(told["left_out"])
    except OnchipError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FormatError(
            "not a plan", got=got, expected="what plan_to_json wrote", hint="make the plan again"
        ) from None
    if [name for claim in chosen for name in claim.nodes] != [node.name for node in net.nodes]:
        raise FormatError("not a plan", got="groups that leave layers out", expected="every layer once, in order")
    return Plan(net, device, job, groups, rewrites, refusals, fold, left_out, building)


def _claim(
    net: Network, places: Mapping[str, int], entry: Mapping[str, Any], device: Device, job: Job,
    kernels: Sequence[Kernel],
) -> Claim:  # fmt: skip
    """The claim of a group, as its kernel offers it now. `places` maps node names to their indices."""
    name, layers = entry["kernel"], tuple(entry["layers"])
    start = places.get(layers[0], -1) if layers else -1
    if not name and start >= 0:
        return no_claim(net, net.nodes[start], job)
    for kernel in kernels:
        if kernel.name != name or kernel.device_kind != device.kind:
            continue
        answers: Iterable[Claim | Refusal | None] = ()
        if start >= 0:
            answers = kernel.claims(net, start, device, job)
        elif not layers and isinstance(kernel, Converter):
            ((value, wanted),), (given,) = entry["writes"].items(), entry["reads"].values()
            answers = (kernel.conversion(net, value, given, wanted, device, job),)
        for answer in answers:
            if isinstance(answer, Claim) and _group_to_json(answer) == {**entry, "layers": layers}:
                return answer
    raise PlanError(
        f"no kernel takes {show(layers[0] if layers else '')} as the plan says",
        got=show(f"{name}: {entry['label']}, {entry['order'] or 'no sums'}"),
        expected="a kernel of this onchip that does the same", hint="plan again: the bits of the results may change",
    )  # fmt: skip


def _group_to_json(claim: Claim) -> dict[str, Any]:
    """The kernel, its layers, its reduction order, and the layouts of values that are not in ROWS."""
    told = {"kernel": claim.kernel, "label": claim.label, "layers": claim.nodes, "order": claim.order}
    reads = {value: use.layout for value, use in claim.reads.items() if use.layout != ROWS or not claim.nodes}
    return told | {key: found for key, found in (("reads", reads), ("writes", dict(claim.writes))) if found}


def _device_to_json(device: Device) -> dict[str, Any]:
    return _rates(device) | {"peak": _rates(device.peak)}


def _rates(of: Device | Peak) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)} | {"flops": dict(of.flops)}


def _device(entry: Mapping[str, Any]) -> Device:
    return Device(**{**entry, "peak": Peak(**entry["peak"])})


def _job(entry: Mapping[str, Any]) -> Job:
    return Job(**{**entry, "without": tuple(entry["without"])})


def _recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    return {
        "op": recipe.op,
        "sources": [source if isinstance(source, str) else _recipe_to_json(source) for source in recipe.sources],
        "shape": recipe.shape, "dtype": recipe.dtype, "flop": recipe.flop, "attributes": dict(recipe.attributes),
    }  # fmt: skip


def _recipe_from_json(entry: Mapping[str, Any]) -> Recipe:
    if not _OPERATION.fullmatch(entry["op"]):
        raise FormatError("a recipe of an unknown operation", got=show(entry["op"]), expected="module:function")
    sources = tuple(source if isinstance(source, str) else _recipe_from_json(source) for source in entry["sources"])
    attributes = tuple(sorted((name, _as_tuple(value)) for name, value in entry["attributes"].items()))
    return Recipe(entry["op"], sources, tuple(entry["shape"]), entry["dtype"], entry["flop"], attributes)


def _as_tuple(value: Any) -> Any:
    """Lists to tuples: JSON has no tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
