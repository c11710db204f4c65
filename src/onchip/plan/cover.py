"""The cheapest cover of a network with claims: a shortest path over (position, layouts of live values)."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from onchip.errors import PlanError
from onchip.network.graph import Network, Node, changing_weights
from onchip.network.recipe import Recipe, as_is, reach, value_of
from onchip.network.types import DTYPE_BYTES
from onchip.plan.build_cost import build_us, dtype_of, is_alias, recipe_rates_of
from onchip.plan.device import Device
from onchip.plan.kernel import (
    TABLES,
    Claim,
    Converter,
    Cost,
    Job,
    Kernel,
    Refusal,
    StepKernel,
    by_reason,
    for_rows_of,
    runs_whole_step,
)
from onchip.plan.layout import ROWS
from onchip.plan.plan import Group, Plan, groups_of, values_read

# Above any real cost: a layer is left without a kernel, or to a fallback, only if no other kernel claims it.
_NO_KERNEL_US = 1e12
MAX_STATES = 16  # layout states followed per position, cheapest first

# (value, layout) for each layout of a live value that is not stored only in ROWS.
State = frozenset[tuple[str, str]]
_IN_ROWS: State = frozenset()


@dataclass(frozen=True, eq=False)
class _Path:
    """How the search reaches a state at a position."""

    cost: float
    previous: _Path | None
    claims: tuple[Claim, ...] = ()  # layout conversions, then the claim that leads here

    def all_claims(self) -> list[Claim]:
        found: list[Claim] = []
        path: _Path | None = self
        while path is not None:
            found += reversed(path.claims)
            path = path.previous
        return found[::-1]


def cover(
    net: Network, device: Device, kernels: Sequence[Kernel], job: Job, rewrites: tuple[str, ...], whole: bool
) -> Plan:
    """The plan with the lowest estimate. Groups are consecutive nodes, so the cheapest cover is a shortest path.

    best[i] holds the cheapest paths over the nodes before i, one per layout state of the live values. A claim at i
    leads to the position after its last node. A kernel may take a while to answer, so kernels are not queried at a node
    that no claim leads to, or that costs as much to reach as the cheapest complete path found so far.
    A training step is covered by layers only if no kernel runs it whole; their estimates are not compared.
    """
    refusals: list[Refusal] = []
    if net.trained:
        steps = [kernel for kernel in kernels if isinstance(kernel, StepKernel)]
        if claims := _claims(net, 0, device, steps, job, (), refusals):
            chosen = min(claims, key=lambda claim: claim.cost.estimate_us(device, job.precision, job.batch))
            return _plan(net, device, kernels, job, [chosen], rewrites, refusals)
        kernels = [kernel for kernel in kernels if kernel not in steps]
    count = len(net.nodes)
    best: list[dict[State, _Path]] = [{} for _ in range(count + 1)]
    best[0][_IN_ROWS] = _Path(0.0, None)
    layouts, operations = _Layouts(net, device, kernels, job), recipe_rates_of(kernels, device)
    claimed: set[str] = set()
    furthest = 0
    for start in range(count):
        furthest = start if best[start] else furthest
        cheapest = min((path.cost for path in best[count].values()), default=float("inf"))
        paths = layouts.worth_following({state: path for state, path in best[start].items() if path.cost < cheapest})
        if not paths:
            continue
        claims = _claims(net, start, device, kernels, job, operations, refusals)
        claimed.update(name for claim in claims for name in claim.nodes)
        if not claims and not whole:
            claims = [no_claim(net, net.nodes[start], job)]
        for claim in claims:
            end, reads = start + len(claim.nodes), {v: claim.layout_read(v) for v in values_read(net, claim)}
            cost = claim.cost.estimate_us(device, job.precision, job.batch)
            if claim.is_fallback or not claim.kernel:
                cost += _NO_KERNEL_US
            for state, path in paths:
                layouts.step(best[end], end, state, path, claim, reads, cost)
    if not best[count]:
        # No path crosses a layer that no kernel claims: name that layer, if there is one.
        node = next((node for node in net.nodes if node.name not in claimed), net.nodes[furthest])
        raise _no_kernel(net, node, device, job, refusals)
    path = min(best[count].values(), key=lambda path: path.cost)
    return _plan(net, device, kernels, job, path.all_claims(), rewrites, refusals)


def _plan(
    net: Network, device: Device, kernels: Sequence[Kernel], job: Job, chosen: Sequence[Claim],
    rewrites: tuple[str, ...], refusals: Sequence[Refusal],
) -> Plan:  # fmt: skip
    """The plan of these claims, with the refusals at their first layers."""
    planned = {claim.nodes[0] for claim in chosen if claim.nodes}
    shown = dict.fromkeys(r for r in refusals if r.node in planned)
    groups = groups_of(net, chosen)
    return Plan(net, device, job, groups, rewrites, tuple(shown), build_us=plan_build_us(net, groups, device, kernels))


def plan_build_us(net: Network, groups: Sequence[Group], device: Device, kernels: Sequence[Kernel]) -> float:
    """Microseconds to compute the weights that the groups need, and their sources."""
    wanted = [recipe for group in groups for recipe in group.claim.recipes.values()]
    recipes = {weight for weight in reach(wanted, net.weights).values() if isinstance(weight, Recipe)}
    return build_us(recipes, net.weights, device, recipe_rates_of(kernels, device))


@functools.lru_cache(4 * MAX_STATES)
def _by_value(state: State) -> Mapping[str, tuple[str, ...]]:
    """The layouts of each value that is not stored only in ROWS."""
    stored: dict[str, tuple[str, ...]] = {}
    for value, layout in sorted(state):
        stored[value] = (*stored.get(value, ()), layout)
    return MappingProxyType(stored)


class _Layouts:
    """The layouts of values on a path, and the cost of converting them."""

    def __init__(self, net: Network, device: Device, kernels: Sequence[Kernel], job: Job) -> None:
        self._net, self._device, self._job = net, device, job
        self._converters = [k for k in kernels if isinstance(k, Converter) and k.device_kind == device.kind]
        self._conversions: dict[tuple[str, str, str], Claim | None] = {}
        self._last_read = {value: i for i, node in enumerate(net.nodes) for value in node.inputs}
        self._last_read |= dict.fromkeys(net.outputs, len(net.nodes))

    def worth_following(self, paths: dict[State, _Path]) -> list[tuple[State, _Path]]:
        """The cheapest states, without those that conversions from the cheapest state reach at no higher cost."""
        if len(paths) < 2:
            return list(paths.items())
        (least, first), *others = sorted(paths.items(), key=lambda each: each[1].cost)
        worth = [(least, first)]
        for state, path in others:
            wanted = sorted(state - least)
            if gone := {value for value, _ in least - state}:
                wanted += [(value, ROWS) for value in sorted(gone - {value for value, _ in state})]
            conversions: list[Claim] = []
            reachable = all(self._convert(least, {}, {value: layout}, conversions) for value, layout in wanted)
            if not reachable or path.cost < first.cost + self._cost(conversions):
                worth.append((state, path))
        return worth[:MAX_STATES]

    def _cost(self, claims: Sequence[Claim]) -> float:
        return sum(claim.cost.estimate_us(self._device, self._job.precision, self._job.batch) for claim in claims)

    def step(
        self, paths: dict[State, _Path], end: int, state: State, path: _Path, claim: Claim, reads: Mapping[str, str],
        cost: float,
    ) -> None:  # fmt: skip
        """Record the path by which a claim leads from a state to position `end`, unless a cheaper one leads there.

        reads  the values that the claim reads, each in a layout
        """
        cost += path.cost
        before: list[Claim] = []
        tail: list[Claim] = []
        if state or claim.has_layouts:
            new: dict[str, tuple[str, ...]] = {}
            if not self._convert(state, new, reads, before):
                return
            new |= {value: (layout,) for value, layout in claim.writes.items()}
            ends = dict.fromkeys(self._net.outputs, ROWS) if end == len(self._net.nodes) else {}
            if not self._convert(state, new, ends, tail):
                return
            state = self._state_after(state, new, (*reads, *new), end)
            cost += self._cost((*before, *tail))
        if state not in paths or cost < paths[state].cost:
            paths[state] = _Path(cost, path, (*before, claim, *tail))

    def _state_after(self, state: State, new: Mapping[str, tuple[str, ...]], used: Iterable[str], end: int) -> State:
        """The state at position `end`: only the values that a claim used can have new layouts, or no reader left."""
        stored, gone, come = _by_value(state), list[tuple[str, str]](), list[tuple[str, str]]()
        for value in used:
            gone += [(value, layout) for layout in stored.get(value, ())]
            found = new.get(value) or stored.get(value, (ROWS,))
            if found != (ROWS,) and self._last_read.get(value, -1) >= end:
                come += [(value, layout) for layout in found]
        return state.difference(gone).union(come) if gone or come else state

    def _convert(
        self, state: State, new: dict[str, tuple[str, ...]], wanted: Mapping[str, str], claims: list[Claim]
    ) -> bool:
        """Convert each value to its wanted layout: appends the claims needed; False if no kernel converts one.

        new  layouts of values after the state, which conversions add to
        """
        stored = _by_value(state)
        for value, layout in wanted.items():
            found = new.get(value) or stored.get(value, (ROWS,))
            if layout not in found:
                claim = self._conversion(value, found[0], layout)
                if claim is None:
                    return False
                claims.append(claim)
                new[value] = (*found, layout)
        return True

    def _conversion(self, value: str, layout: str, wanted: str) -> Claim | None:
        key = value, layout, wanted
        if key not in self._conversions:
            found = (k.conversion(self._net, value, layout, wanted, self._device, self._job) for k in self._converters)
            self._conversions[key] = next((claim for claim in found if claim is not None), None)
        return self._conversions[key]


def _claims(
    net: Network, start: int, device: Device, kernels: Sequence[Kernel], job: Job, operations: Container[str],
    refusals: list[Refusal],
) -> list[Claim]:  # fmt: skip
    """Every claim that begins at a node. Appends refusals to `refusals`."""
    claims: list[Claim] = []
    for kernel in kernels:
        if kernel.device_kind != device.kind:
            continue
        for answer in answers(kernel, net, start, device, job, operations):
            if isinstance(answer, Refusal):
                refusals.append(answer)
            else:
                claims.append(answer)
    return claims


def answers(
    kernel: Kernel, net: Network, start: int, device: Device, job: Job, operations: Container[str]
) -> Iterator[Claim | Refusal]:
    """A kernel's claims and refusals for a node; without those that a network with state cannot have.

    operations  recipe_rates_of the device's kernels
    """
    for answer in kernel.claims(net, start, device, job):
        if isinstance(answer, Refusal) or runs_whole_step(answer, net):
            yield answer
        elif not net.state:
            yield for_rows_of(answer, net)
        elif _fits_step(net, answer) and (claim := _with_weights(net, answer, device, operations)) is not None:
            yield for_rows_of(claim, net)


def _fits_step(net: Network, claim: Claim) -> bool:
    """Whether a claim stores weights and state in ROWS, and computes no value that its recipes need before it runs."""
    if not net.kept.isdisjoint(claim.writes):
        return False
    needed = map(value_of, reach(claim.recipes.values(), net.weights).values())
    return set(claim.nodes).isdisjoint(needed)


def _with_weights(net: Network, claim: Claim, device: Device, operations: Container[str]) -> Claim | None:
    """The claim, with the cost of the weights that are computed in each run; None if the device cannot compute one.

    One launch derives all weights of state; those of values cost one each.
    """
    found = changing_weights(claim.recipes.values(), net)
    changing = [recipe for recipe in found if not (value_of(recipe) or is_alias(recipe, net.weights))]
    if not changing:
        return claim
    if device.kind != "cpu" and not all(_is_rearranged(each, net) or each.op in operations for each in changing):
        return None
    of_values = sum(any(map(value_of, reach([recipe], net.weights).values())) for recipe in changing)
    fixed_bytes = claim.cost.fixed_bytes + sum(2 * recipe.nbytes for recipe in changing)
    return replace(claim, cost=replace(claim.cost, fixed_bytes=fixed_bytes, launches=claim.cost.launches + of_values))


def _is_rearranged(recipe: Recipe, net: Network) -> bool:
    """Whether it is a rearrangement that a device computes: in one dtype, or from float32."""
    return recipe.is_rearrangement and dtype_of(recipe.sources[0], net.weights) in (recipe.dtype, "float32")


def no_claim(net: Network, node: Node, job: Job) -> Claim:
    """The placeholder for a layer that no kernel claims: its weights unchanged, and the bytes any kernel must move."""
    reads = sum(t.row_bytes for t in net.input_types(node))
    dtypes = {role: t.dtype for role, t in net.node_weight_types(node).items()}
    if node.layer.has_tables and job.tables != "fp32":
        dtypes["weight"] = TABLES[job.tables]
    recipes = {
        role: Recipe.of(as_is, (name,), net.weights[name].shape, dtypes[role]) for role, name in node.weights.items()
    }
    fixed = sum(recipe.nbytes for recipe in recipes.values())
    if looked_up := net.row_lookup_elements(node):  # only these table rows are read; no cache hits are assumed
        fixed -= recipes["weight"].nbytes
        reads += looked_up * DTYPE_BYTES[dtypes["weight"]]
    cost = Cost(net.row_flop(node), reads + net.types[node.name].row_bytes, fixed)
    label, why = f"none yet for {node.layer.kind}", "no kernel of this device supports it yet"
    return for_rows_of(Claim("", label, (node.name,), cost, why, recipes), net)


def _no_kernel(net: Network, node: Node, device: Device, job: Job, refusals: Sequence[Refusal]) -> PlanError:
    reasons = "; ".join(f"{r.kernel}: {r.why}" for r in by_reason(refusals) if r.node == node.name)
    if net.trained and node is net.nodes[0]:  # a kernel that runs whole steps claims all or nothing
        name = net.trained.network.name
        return PlanError(
            f"no kernel of {device.name} trains network '{name}'", got=reasons or f"a {node.layer.kind}",
            expected="a network that a training kernel claims as a whole",
            hint="onchip.mlp, or remove the layer named above",
        )  # fmt: skip
    return PlanError(
        f"no kernel of {device.name} supports layer '{node.name}' ({node.layer.kind})",
        got=reasons or f"{', '.join(str(t) for t in net.input_types(node))}",
        expected="a layer and precision that a kernel supports",
        hint="onchip check MODEL, or another device",
    )
