"""A plan as JSON: what another process, or another day, needs to run the same kernels over the same weights.

{"version": 1, "device": {...}, "job": {...}, "network": {...}, "recipes": {"a+b.weight": {...}},
 "groups": [{"kernel": "mlp_fused", "label": "mlp_fused<4,3>", "layers": ["a+b"], "order": "k in order"}],
 "rewrites": [...], "refusals": [...], "fold": ""}

The choice is written down, not how a kernel carries it out: that is asked of the kernel again, and it is an error if it
would do something else now. Weights that are numbers stand elsewhere; those that are still to be made are recipes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onchip.errors import FormatError, OnchipError, PlanError
from onchip.formats.graph_json import graph_from_json, graph_to_json, parse_json
from onchip.plan.device import Device, Peak
from onchip.plan.kernel import Claim, Job, Kernel, Refusal
from onchip.plan.planner import Plan, groups_of, no_claim
from onchip.spec.network import Network
from onchip.spec.reading import show
from onchip.spec.recipe import Array, Recipe, Weight, reach

VERSION = 1
# "module:function", but no module that does something when it is imported.
_OPERATION = re.compile(r"([a-z][a-z0-9_]*\.)*[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")


def plan_to_json(plan: Plan) -> str:
    weights = _reached(plan.network)
    device = _rates(plan.device) | {"peak": _rates(plan.device.peak)}
    return json.dumps({
        "version": VERSION,
        "device": device,
        "job": dataclasses.asdict(plan.job),
        "network": json.loads(graph_to_json(plan.network)),
        "recipes": {name: _recipe_to_json(w) for name, w in sorted(weights.items()) if isinstance(w, Recipe)},
        "groups": [
            {"kernel": g.claim.kernel, "label": g.claim.label, "layers": g.claim.nodes, "order": g.claim.order}
            for g in plan.groups
        ],
        "rewrites": plan.rewrites,
        "refusals": [dataclasses.asdict(refusal) for refusal in plan.refusals],
        "fold": plan.fold,
    })  # fmt: skip


def plan_digest(plan: Plan) -> str:
    """The same for plans that run the same kernels over weights of the same names and shapes."""
    return hashlib.sha256(plan_to_json(plan).encode()).hexdigest()


def given_weights(net: Network) -> dict[str, Array]:
    """The weights that a plan's JSON does not hold: those that are numbers already."""
    return {name: w for name, w in _reached(net).items() if not isinstance(w, Recipe)}


def _reached(net: Network) -> dict[str, Weight]:
    """The weights that the layers use, and those that these are made of, in the network's order."""
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
        starts = {node.name: i for i, node in enumerate(net.nodes)}
        chosen = [_claim(net, entry, starts, device, job, kernels) for entry in told["groups"]]
        refusals = tuple(Refusal(**entry) for entry in told["refusals"])
        rewrites, fold = tuple(map(str, told["rewrites"])), str(told["fold"])
    except OnchipError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FormatError(
            "not a plan", got=got, expected="what plan_to_json wrote", hint="make the plan again"
        ) from None
    if [name for claim in chosen for name in claim.nodes] != [node.name for node in net.nodes]:
        raise FormatError("not a plan", got="groups that leave layers out", expected="every layer once, in order")
    return Plan(net, device, job, groups_of(net, chosen), rewrites, refusals, fold)


def _claim(
    net: Network,
    entry: Mapping[str, Any],
    starts: Mapping[str, int],
    device: Device,
    job: Job,
    kernels: Sequence[Kernel],
) -> Claim:
    """The claim of a group, as its kernel makes it now; `starts` says where each layer stands."""
    name, label, layers, order = entry["kernel"], entry["label"], tuple(entry["layers"]), entry["order"]
    start = starts.get(layers[0], -1) if layers else -1
    if not name and start >= 0:
        return no_claim(net, net.nodes[start], job)
    for kernel in kernels if start >= 0 else ():
        if kernel.name == name and kernel.device_kind == device.kind:
            for answer in kernel.claims(net, start, device, job):
                if isinstance(answer, Claim) and (answer.label, answer.nodes, answer.order) == (label, layers, order):
                    return answer
    raise PlanError(
        f"no kernel takes {show(layers[0] if layers else '')} as the plan says",
        got=show(f"{name}: {label}, {order or 'no sums'}"),
        expected="a kernel of this onchip that does the same", hint="plan again: the bits of the results may change",
    )  # fmt: skip


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
    """JSON has lists where an attribute has tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
