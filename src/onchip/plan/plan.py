"""A plan: which kernel runs which layers, what passes between them, and why. Data that prints itself."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onchip.errors import PlanError, printable
from onchip.network.graph import Network, TrainedStep
from onchip.network.recipe import Recipe, reach
from onchip.network.text import columns, escaped, html_table, plural
from onchip.network.types import DTYPE_BYTES, TensorType
from onchip.plan.device import Device
from onchip.plan.kernel import TABLES, Claim, Job, Refusal, by_reason, runs_whole_step
from onchip.plan.layout import ROWS, stored_type
from onchip.plan.slow import slow_because


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive layers that one kernel runs together."""

    claim: Claim
    inputs: tuple[str, ...]  # arrays it reads: values by name, or values in a layout (layout_name)
    outputs: tuple[str, ...]  # arrays it writes that others read


@dataclass(frozen=True, eq=False)
class Plan:
    """What will run: groups of layers, each with its kernel, its cost and the reason. It prints itself as a table."""

    network: Network  # after the rewrites
    device: Device
    job: Job
    groups: tuple[Group, ...]
    rewrites: tuple[str, ...]  # what the rewrites did, one line each
    refusals: tuple[Refusal, ...]
    fold: str = ""  # whether embeddings were folded, and why
    left_out: tuple[str, ...] = ()  # rewrites that do not pay, one line each
    build_us: float = 0.0  # estimated time to compute, once, all weights that the kernels need

    @property
    def whole_step(self) -> TrainedStep | None:
        """The training step that one kernel runs; None for a network without state, and a step planned by layers."""
        trained = self.network.trained
        return trained if trained and runs_whole_step(self.groups[0].claim, self.network) else None

    def check_layers(self) -> None:
        """PlanError if one kernel runs a whole training step: it trains on rows of its own, over many steps."""
        if self.whole_step is not None:
            raise PlanError(
                "the plan is for a training run", got=self.groups[0].claim.label, expected="a step planned by layers",
                hint="onchip.fit(net, x, y), or a plan without the kernels that run whole steps",
            )  # fmt: skip

    @property
    def floor_us(self) -> float:
        return self.floor_at(self.job.batch)

    def floor_at(self, B: int) -> float:
        """A lower bound on the time of B rows, in microseconds."""
        return sum(g.claim.cost.floor_us(self.device, self.job.precision, B) for g in self.groups)

    @property
    def estimate_us(self) -> float:
        return self.estimate_at(self.job.batch)

    def estimate_at(self, B: int) -> float:
        """The estimated time of B rows, in microseconds."""
        return sum(g.claim.cost.estimate_us(self.device, self.job.precision, B) for g in self.groups)

    @property
    def between_bytes(self) -> int:
        """Bytes per row that pass through memory between groups: what fusion did not remove."""
        return sum(self.types[name].row_bytes for name in self.between if self.types[name].is_batched)

    @functools.cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every array that groups read and write, as it is stored in memory."""
        net = self.network
        types = dict(net.inputs)
        for group in self.groups:
            for value in group.claim.nodes or group.claim.writes:
                layout = group.claim.writes.get(value, ROWS)
                types[layout_name(net, value, layout)] = stored_type(net.types[value], layout)
        return types

    @property
    def is_read_often(self) -> bool:
        """Whether kernels read a network input several times, or read an output back: slow over a bus."""
        ends = {*self.network.inputs, *self.network.outputs}
        reads = [self.stored_in[name] for group in self.groups for name in group.inputs if not group.claim.is_view]
        uses = ((value, use) for group in self.groups for value, use in group.claim.reads.items())
        often = {self.stored_in.get(value, value) for value, use in uses if use.is_read_often}
        read_back = {self.stored_in[name] for group in self.groups for name in group.outputs} & set(reads)
        return bool(ends & (often | read_back)) or any(reads.count(name) > 1 for name in self.network.inputs)

    @functools.cached_property
    def stored_in(self) -> Mapping[str, str]:
        """For every array that groups read or write: the array whose memory it uses, usually itself.

        A view uses the memory of its source. A view that is a network output owns the memory and its source uses it,
        unless the source is itself an input or output: then the view has its own memory and is copied there.
        """
        ends = {*self.network.inputs, *self.network.outputs}
        owner = {name: name for group in self.groups for name in (*group.inputs, *group.outputs)}
        for group in self.groups:
            if group.claim.is_view:
                (source,), (view,) = group.inputs, group.outputs
                if view not in ends:
                    owner[view] = owner[source]
                elif owner[source] not in ends:
                    owner |= dict.fromkeys([name for name, at in owner.items() if at == owner[source]], view)
        return owner

    @functools.cached_property
    def between(self) -> tuple[str, ...]:
        """The arrays with memory of their own that one group writes and another reads."""
        written = dict.fromkeys(name for group in self.groups for name in group.outputs)
        return tuple(name for name in written if name not in self.network.outputs and self.stored_in[name] == name)

    @functools.cached_property
    def updated_in_place(self) -> Mapping[str, str]:
        """The values that may be stored in the state that they replace, which no later group reads."""
        net, last_read = self.network, dict[str, int]()
        for i, group in enumerate(self.groups):
            reached = reach(group.claim.recipes.values(), net.weights)
            last_read |= {name: i for name in reached if isinstance(name, str) and name in net.state}
        by_value = {value: name for name, value in net.state.items() if value}
        return {
            value: by_value[value]
            for i, group in enumerate(self.groups)
            if group.claim.updates_in_place
            for value in group.outputs
            if value in by_value and value not in net.outputs and last_read.get(by_value[value], i) <= i
        }

    @property
    def rewrite_flop(self) -> int:
        """The flop to compute the weights that rewrites derived, once, when an engine is built."""
        used = [name for node in self.network.nodes for name in node.weights.values()]
        reached = reach(used, self.network.weights).values()
        return sum(recipe.flop for recipe in {weight for weight in reached if isinstance(weight, Recipe)})

    @property
    def tables_unused(self) -> str:
        """Why tables are not stored in the requested, narrower dtype; "" if they are, or if fp32 was requested."""
        tables = {n.weights["weight"] for n in self.network.nodes if n.layer.has_tables}
        nbytes = DTYPE_BYTES[TABLES[self.job.tables]]
        if self.job.tables == "fp32" or any(DTYPE_BYTES[recipe.dtype] == nbytes for recipe in self._recipes_of(tables)):
            return ""
        return "no kernel of this plan supports them" if tables else "no embedding was folded"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as the kernels store them."""
        return sum(group.claim.weight_bytes for group in self.groups)

    def _recipes_of(self, weights: set[str]) -> list[Recipe]:
        """The kernels' recipes that read these weights, or compute one directly from the arrays it is derived from."""
        found = []
        for recipe in (recipe for group in self.groups for recipe in group.claim.recipes.values()):
            is_nested = any(isinstance(source, Recipe) for source in recipe.sources)
            if weights.intersection(recipe.sources) or (is_nested and self._derives_from(recipe, weights)):
                found.append(recipe)
        return found

    def _derives_from(self, recipe: Recipe, weights: set[str]) -> bool:
        origins = self._origins(recipe)
        return any(self._origins(name) <= origins for name in weights)

    def _origins(self, weight: str | Recipe) -> set[str | Recipe]:
        """The arrays, and the recipes without sources, that a weight is derived from."""
        reached = reach([weight], self.network.weights).items()
        return {name for name, found in reached if not isinstance(found, Recipe) or not found.sources}

    def stored_bytes(self, weights: set[str]) -> int:
        """Bytes that the kernels store for these weights."""
        return sum(recipe.nbytes for recipe in self._recipes_of(weights))

    def slow_because(self, group: Group) -> str:
        """Why a group is estimated at more than twice its floor; "" if it is not."""
        return slow_because(group.claim, self.device, self.job, self.refusals)

    def to_dict(self) -> dict[str, object]:
        return {
            "network": self.network_name,
            "device": self.device.name,
            "precision": self.job.precision,
            "batch": self.job.batch,
            "job": "train" if self.network.state else "infer",
            "floor_us": self.floor_us,
            "estimate_us": self.estimate_us,
            "groups": [
                {
                    "layers": list(self.layers_of(g)),
                    "kernel": g.claim.label,
                    "fast_bytes": g.claim.fast_bytes,
                    "row_bytes": g.claim.cost.row_bytes,
                    "row_flop": g.claim.cost.row_flop,
                    "weight_bytes": g.claim.weight_bytes,
                    "build_flop": g.claim.build_flop,
                    "floor_us": g.claim.cost.floor_us(self.device, self.job.precision, self.job.batch),
                    "estimate_us": g.claim.cost.estimate_us(self.device, self.job.precision, self.job.batch),
                    "order": g.claim.order,
                    "why": g.claim.why,
                    "slow": self.slow_because(g),
                }
                for g in self.groups
            ],
            "rewrite_flop": self.rewrite_flop,
            "build_us": self.build_us,
            "rewrites": list(self.rewrites),
            "fold": self.fold,
            "left_out": list(self.left_out),
            "tables": self.job.tables,
            "tables_unused": self.tables_unused,
            "refusals": [{"kernel": r.kernel, "layer": r.node, "why": r.why} for r in self.refusals],
        }

    @property
    def without_kernel(self) -> tuple[str, ...]:
        """The layers that no kernel of the device supports yet; a plan with such layers cannot run."""
        return tuple(name for group in self.groups if not group.claim.kernel for name in group.claim.nodes)

    @property
    def network_name(self) -> str:
        """Of a training step: the name of the network that it trains."""
        return self.network.trained.network.name if self.network.trained else self.network.name

    def layers_of(self, group: Group) -> tuple[str, ...]:
        """The layers that a group runs; of a whole training step, those of the network that it trains."""
        return tuple(node.name for node in self.whole_step.network.nodes) if self.whole_step else group.claim.nodes

    @property
    def title(self) -> str:
        trained = self.network.trained
        work = f"train, {trained.how.loss}" if trained else "train" if self.network.state else "infer"
        title = f"{self.network_name} on {self.device.name}, {self.job.precision}, {work}, {self.job.batch:,} rows"
        if missing := self.without_kernel:
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            title += f": cannot run, no kernel runs {missing[0]}{more}"
        return printable(title)

    def __str__(self) -> str:
        return "\n".join([self.title, columns(*self._table(), right=(3, 4, 5, 6, 7)), *self._remarks()])

    def __repr__(self) -> str:
        return f"Plan({self.title}: {plural(len(self.groups), 'group')}, estimate {format_us(self.estimate_us)})"

    def _repr_html_(self) -> str:
        remarks = "".join(f"<li>{escaped(line)}</li>" for line in self._remarks())
        return f"<p>{escaped(self.title)}</p>{html_table(*self._table())}<ul>{remarks}</ul>"

    def text(self, width: int) -> str:
        """The printed plan if it fits `width` columns; else a paragraph per group, wrapped to that width."""
        if max(map(len, str(self).splitlines())) <= width:
            return str(self)
        _, rows = self._table()
        lines = [self.title]
        for i, layers, kernel, fast, nbytes, flop, floor, estimate, why in rows:
            lines.append(f"{i}  {layers}: {kernel}; {why}")
            lines.append(f"   {nbytes} B/row, {flop} flop/row, {fast} on chip, floor {floor}, estimate {estimate}")
        lines += self._remarks()
        return "\n".join(textwrap.fill(line, width, subsequent_indent="   ", break_on_hyphens=False) for line in lines)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        head = ["group", "layers", "kernel", "on chip", "bytes/row", "flop/row", "floor", "estimate", "why"]
        rows = []
        for i, group in enumerate(self.groups):
            claim, nodes = group.claim, self.layers_of(group)
            layers = f"{nodes[0]}..{nodes[-1]}" if len(nodes) > 1 else next(iter(nodes or claim.writes))
            args = (self.device, self.job.precision, self.job.batch)
            times = format_us(claim.cost.floor_us(*args)), format_us(claim.cost.estimate_us(*args))
            sizes = f"{claim.fast_bytes / 1024:.0f} KiB", f"{claim.cost.row_bytes:,}", f"{claim.cost.row_flop:,}"
            rows.append([printable(cell) for cell in (str(i), layers, claim.label, *sizes, *times, claim.why)])
        return head, rows

    def _remarks(self) -> list[str]:
        """The lines below the table."""
        build_flop = sum(group.claim.build_flop for group in self.groups) + self.rewrite_flop
        weights = f"{self.weight_bytes / 1024:,.0f} KiB of weights, {build_flop:,} flop to build them"
        whole = f"floor {format_us(self.floor_us)}, estimate {format_us(self.estimate_us)}"
        lines = [f"{whole}, {self.between_bytes:,} B/row between groups, {weights}"]
        if nhwc := [value for group in self.groups for value in group.claim.writes if group.claim.nodes]:
            lines.append(f"NHWC between groups: {', '.join(nhwc)}")
        slow = [(i, why) for i, group in enumerate(self.groups) if (why := self.slow_because(group))]
        lines += [f"slow: group {i} takes over twice its floor: {why}" for i, why in slow]
        lines += [f"rewrote: {line}" for line in self.rewrites]
        lines += [line for line in (self.fold, *self.left_out) if line]
        if unused := self.tables_unused:
            lines.append(f"{self.job.tables} tables are not used: {unused}")
        lines += [f"refused: {r.kernel} at {r.node}: {r.why}" for r in by_reason(self.refusals)]
        return [printable(line) for line in lines]


def format_us(us: float) -> str:
    if us < 1000:
        return f"{us:.1f} µs"
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def layout_name(net: Network, value: str, layout: str) -> str:
    """The name of the array that holds a value in a layout: for ROWS, the value's own name."""
    if layout == ROWS:
        return value
    name = f"{value}:{layout}"
    while name in net.types:
        name += "'"
    return name


def values_read(net: Network, claim: Claim) -> list[str]:
    """The inputs of a claim's nodes that none of them computes, in the order of their first use."""
    inside = set(claim.nodes)
    found = (value for name in claim.nodes for value in net.by_name[name].inputs)
    return [value for value in dict.fromkeys(found) if value not in inside]


def values_written(net: Network, nodes: Sequence[str]) -> list[str]:
    """The values of these nodes that are needed outside them, in their order."""
    inside = set(nodes)
    return [
        name for name in nodes if name in net.kept or any(reader.name not in inside for reader in net.readers(name))
    ]


def groups_of(net: Network, claims: Sequence[Claim]) -> tuple[Group, ...]:
    """The claims with the arrays that they read and write. A claim without nodes converts a value to another layout."""
    read_outside = set(net.kept)
    reads = [values_read(net, claim) for claim in claims]
    read_outside.update(*reads)
    groups = []
    for claim, values in zip(claims, reads, strict=True):
        read = values if claim.nodes else list(claim.reads)
        written = [name for name in claim.nodes if name in read_outside] if claim.nodes else list(claim.writes)
        inputs = (layout_name(net, value, claim.layout_read(value)) for value in read)
        outputs = (layout_name(net, value, claim.writes.get(value, ROWS)) for value in written)
        groups.append(Group(claim, tuple(inputs), tuple(outputs)))
    return tuple(groups)
