"""From a network to a plan: which kernel takes which layers, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onchip.errors import DeviceError, PlanError, printable
from onchip.plan.device import Device
from onchip.plan.kernel import PRECISIONS, Claim, Job, Kernel, Price, Refusal
from onchip.plan.rewrites import fold_embeddings, rewrite
from onchip.spec.network import Network, Node
from onchip.spec.recipe import Recipe, as_is, reach
from onchip.spec.text import columns
from onchip.spec.types import DTYPE_BYTES

_NO_KERNEL_US = 1e12  # more than any work: a layer is left without a kernel only where no kernel takes it
MAX_LAYERS = 1 << 14  # planning takes a second or two there
_MANY_ROWS = 1 << 40  # more than any job


@dataclass(frozen=True, eq=False)
class Group:
    """A run of layers that one kernel executes in one go."""

    claim: Claim
    inputs: tuple[str, ...]  # values it reads that others make
    outputs: tuple[str, ...]  # values it makes that others read


@dataclass(frozen=True, eq=False)
class Plan:
    network: Network  # after the rewrites
    device: Device
    job: Job
    groups: tuple[Group, ...]
    rewrites: tuple[str, ...]  # what was rewritten, a line each
    refusals: tuple[Refusal, ...]
    fold: str = ""  # whether embeddings were folded, and why

    @property
    def floor_us(self) -> float:
        return self.floor_at(self.job.batch)

    def floor_at(self, B: int) -> float:
        """Microseconds that B rows take at least."""
        return sum(g.claim.price.floor_us(self.device, self.job.precision, B) for g in self.groups)

    @property
    def estimate_us(self) -> float:
        return self.estimate_at(self.job.batch)

    def estimate_at(self, B: int) -> float:
        """Microseconds that B rows should take."""
        return sum(g.claim.price.estimate_us(self.device, self.job.precision, B) for g in self.groups)

    @property
    def between_bytes(self) -> int:
        """Bytes a row that pass through memory between groups: what fusion did not remove."""
        inside = {value for g in self.groups for value in g.outputs} - set(self.network.outputs)
        return sum(self.network.types[value].row_bytes for value in inside)

    @property
    def rewrite_flop(self) -> int:
        """What the weights that rewrites derived cost, once, when an engine is built."""
        used = [name for node in self.network.nodes for name in node.weights.values()]
        reached = reach(used, self.network.weights).values()
        return sum(recipe.flop for recipe in {weight for weight in reached if isinstance(weight, Recipe)})

    @property
    def tables_unused(self) -> str:
        """Why tables that were asked for in half precision are not kept so; "" if they are, or nobody asked."""
        tables = {n.weights["weight"] for n in self.network.nodes if n.layer.has_tables}
        if self.job.tables == "fp32" or any(DTYPE_BYTES[recipe.dtype] == 2 for recipe in self._made_of(tables)):
            return ""
        return "no kernel of this plan keeps them so" if tables else "nothing was folded into any"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as the kernels keep them."""
        return sum(group.claim.weight_bytes for group in self.groups)

    def _made_of(self, weights: set[str]) -> list[Recipe]:
        """What the kernels keep of some weights."""
        recipes = (recipe for group in self.groups for recipe in group.claim.recipes.values())
        return [recipe for recipe in recipes if weights.intersection(recipe.sources)]

    def kept_bytes(self, weights: set[str]) -> int:
        """Bytes of what the kernels keep of some weights."""
        return sum(recipe.nbytes for recipe in self._made_of(weights))

    def to_dict(self) -> dict[str, object]:
        return {
            "network": self.network.name,
            "device": self.device.name,
            "precision": self.job.precision,
            "batch": self.job.batch,
            "job": "train" if self.job.is_training else "infer",
            "floor_us": self.floor_us,
            "estimate_us": self.estimate_us,
            "groups": [
                {
                    "layers": list(g.claim.nodes),
                    "kernel": g.claim.label,
                    "fast_bytes": g.claim.fast_bytes,
                    "row_bytes": g.claim.price.row_bytes,
                    "row_flop": g.claim.price.row_flop,
                    "weight_bytes": g.claim.weight_bytes,
                    "build_flop": g.claim.build_flop,
                    "floor_us": g.claim.price.floor_us(self.device, self.job.precision, self.job.batch),
                    "estimate_us": g.claim.price.estimate_us(self.device, self.job.precision, self.job.batch),
                    "order": g.claim.order,
                    "why": g.claim.why,
                }
                for g in self.groups
            ],
            "rewrite_flop": self.rewrite_flop,
            "rewrites": list(self.rewrites),
            "fold": self.fold,
            "tables": self.job.tables,
            "tables_unused": self.tables_unused,
            "refusals": [{"kernel": r.kernel, "layer": r.node, "why": r.why} for r in self.refusals],
        }

    def __str__(self) -> str:
        head = ["group", "layers", "kernel", "on chip", "bytes/row", "flop/row", "floor", "estimate", "why"]
        rows = []
        for i, group in enumerate(self.groups):
            claim, nodes = group.claim, group.claim.nodes
            layers = nodes[0] if len(nodes) == 1 else f"{nodes[0]}..{nodes[-1]}"
            given = (self.device, self.job.precision, self.job.batch)
            times = format_us(claim.price.floor_us(*given)), format_us(claim.price.estimate_us(*given))
            sizes = f"{claim.fast_bytes / 1024:.0f} KiB", f"{claim.price.row_bytes:,}", f"{claim.price.row_flop:,}"
            rows.append([str(i), layers, claim.label, *sizes, *times, claim.why])
        work = f"train, {self.job.loss}" if self.job.is_training else "infer"
        name = printable(self.network.name)
        lines = [f"{name} on {self.device.name}, {self.job.precision}, {work}, {self.job.batch:,} rows"]
        lines.append(columns(head, rows, right=(3, 4, 5, 6, 7)))
        build_flop = sum(group.claim.build_flop for group in self.groups) + self.rewrite_flop
        weights = f"{self.weight_bytes / 1024:,.0f} KiB of weights, {build_flop:,} flop to build them"
        whole = f"floor {format_us(self.floor_us)}, estimate {format_us(self.estimate_us)}"
        lines.append(f"{whole}, {self.between_bytes:,} B/row between groups, {weights}")
        lines += [printable(f"rewrote: {line}") for line in self.rewrites]
        lines += [printable(self.fold)] if self.fold else []
        if unused := self.tables_unused:
            lines.append(f"{self.job.tables} tables are not used: {unused}")
        lines += [printable(f"refused: {r.kernel} at {r.node}: {r.why}") for r in self.refusals]
        return "\n".join(lines)


def _size(count: int) -> str:
    unit, step = next(((unit, step) for unit, step in (("GiB", 30), ("MiB", 20)) if count >= 1 << step), ("KiB", 10))
    return f"{count / (1 << step):.1f} {unit}"


def format_us(us: float) -> str:
    if us < 1000:
        return f"{us:.1f} µs"
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def make_plan(
    net: Network, device: Device, kernels: Sequence[Kernel], job: Job | None = None, *, whole: bool = True
) -> Plan:
    """Rewrite the network, then cover it with kernel claims at the lowest cost. Computes no weight, touches no device.

    whole  a layer that no kernel takes is a PlanError; else it stands in the plan with its floor and no kernel
    """
    job = job or Job()
    if len(net.nodes) > MAX_LAYERS:
        got, expected = f"{len(net.nodes):,}", f"at most {MAX_LAYERS:,}"
        raise PlanError("the network has too many layers", got=got, expected=expected, hint="a network of fewer layers")
    if job.precision not in device.flops:
        known = job.precision in PRECISIONS
        raise (DeviceError if known else PlanError)(
            f"{device.name} does not compute in {job.precision}",
            got=job.precision,
            expected=", ".join(device.flops),
            hint=f"precision {next(iter(device.flops))}",
        )
    if job.is_training:
        return _cover(net, device, kernels, job, (), whole)
    net, told = rewrite(net, job.without)
    folded, lines = (net, []) if "fold" in job.without else fold_embeddings(net)
    if not lines:
        return _cover(net, device, kernels, job, told, whole)
    plans: list[Plan | PlanError] = []
    for version, what in ((net, told), (folded, (*told, *lines))):
        try:
            plans.append(_cover(version, device, kernels, job, what, whole))
        except PlanError as refused:
            plans.append(refused)
    return _cheaper(*plans)


def _cheaper(direct: Plan | PlanError, folded: Plan | PlanError) -> Plan:
    """The plan that is done sooner with all of the job's rows, building included; it tells where the other one wins.

    A fold is work once for less work a row, so it pays from some number of rows on.
    """
    if isinstance(direct, PlanError):
        if isinstance(folded, PlanError):
            raise direct
        return replace(folded, fold=f"folded: {direct.what}")
    if isinstance(folded, PlanError):
        return replace(direct, fold=f"not folded: {folded.what}")
    device, job = direct.device, direct.job
    needed = folded.network.weight_bytes
    if 0 < device.memory_bytes // 2 < needed:  # 0: the machine does not say
        why = f"all weights would take {_size(needed)} of the {_size(device.memory_bytes)} that {device.name} has"
        return replace(direct, fold=f"not folded: {why}, more than half")
    flop = folded.rewrite_flop - direct.rewrite_flop
    used = {name for node in direct.network.nodes for name in node.weights.values()}
    made = {name for node in folded.network.nodes for name in node.weights.values()} - used
    table_bytes = folded.kept_bytes(made)
    build_us = max(flop / device.flops[job.precision], table_bytes / device.bandwidth) * 1e6

    def gain_us(B: int) -> float:
        return direct.estimate_at(B) - folded.estimate_at(B) - build_us

    tables = f"tables of {_size(table_bytes)} take {flop:,} flop ({format_us(build_us)}) to build"
    most = max(job.batch, _MANY_ROWS)
    if gain_us(most) <= 0:
        return replace(direct, fold=f"not folded: {tables}, and a row would be no cheaper")
    low, high = (0, job.batch) if gain_us(job.batch) > 0 else (job.batch, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain_us(middle) > 0 else (middle, high)
    pays = f"{tables}, which pays from {high:,} rows on; this job has {job.batch:,}"
    if high <= job.batch:
        return replace(folded, fold=f"folded: {pays}")
    return replace(direct, fold=f"not folded: {pays}")


def _cover(
    net: Network, device: Device, kernels: Sequence[Kernel], job: Job, told: tuple[str, ...], whole: bool
) -> Plan:
    """Groups are runs of the network's order, so the cheapest cover is a shortest path: best[i] is the cheapest way to
    run the nodes before i, and each claim at i leads to the node behind its last one.

    A kernel may take a while to answer, so nobody is asked at a node that no claim leads to, or that costs as much to
    reach as all of the network does in a way that is known by then.
    """
    count = len(net.nodes)
    best: list[tuple[float, Claim | None]] = [(float("inf") if i else 0.0, None) for i in range(count + 1)]
    refusals: list[Refusal] = []
    claimed: set[str] = set()
    for start in range(count):
        reached = best[start][0]
        if reached >= best[count][0]:
            continue
        claims = _claims(net, start, device, kernels, job, refusals)
        claimed.update(name for claim in claims for name in claim.nodes)
        for claim in claims:
            cost, end = reached + claim.price.estimate_us(device, job.precision, job.batch), start + len(claim.nodes)
            if cost < best[end][0]:
                best[end] = (cost, claim)
        if not claims and not whole and reached + _NO_KERNEL_US < best[start + 1][0]:
            best[start + 1] = (reached + _NO_KERNEL_US, no_claim(net, net.nodes[start], job))
    if best[count][0] == float("inf"):
        # No way leads past a layer that no kernel takes: name that one, if there is one.
        furthest = max(i for i in range(count) if best[i][0] < float("inf"))
        node = next((node for node in net.nodes if node.name not in claimed), net.nodes[furthest])
        raise _no_kernel(net, node, device, refusals)
    chosen: list[Claim] = []
    at = count
    while (last := best[at][1]) is not None:
        chosen.append(last)
        at -= len(last.nodes)
    chosen.reverse()
    planned = {claim.nodes[0] for claim in chosen}
    shown = dict.fromkeys(r for r in refusals if r.node in planned)
    return Plan(net, device, job, groups_of(net, chosen), told, tuple(shown))


def _claims(
    net: Network, start: int, device: Device, kernels: Sequence[Kernel], job: Job, refusals: list[Refusal]
) -> list[Claim]:
    """Every claim that begins at a node; who refuses is noted."""
    claims: list[Claim] = []
    for kernel in kernels:
        if kernel.device_kind != device.kind:
            continue
        if job.precision not in kernel.precisions:
            why = f"computes in {', '.join(kernel.precisions)}, not {job.precision}"
            refusals.append(Refusal(kernel.name, net.nodes[start].name, why))
            continue
        for answer in kernel.claims(net, start, device, job):
            if isinstance(answer, Refusal):
                refusals.append(answer)
            else:
                claims.append(answer)
    return claims


def no_claim(net: Network, node: Node, job: Job) -> Claim:
    """What stands for a layer that no kernel takes: its weights as they are, and what any kernel must move."""
    reads = sum(given.row_bytes for given in net.input_types(node))
    dtypes = {role: given.dtype for role, given in net.node_weight_types(node).items()}
    if node.layer.has_tables and job.tables != "fp32":
        dtypes["weight"] = "float16" if job.tables == "fp16" else "bfloat16"
    recipes = {
        role: Recipe.of(as_is, (name,), net.weights[name].shape, dtypes[role]) for role, name in node.weights.items()
    }
    fixed = sum(recipe.nbytes for recipe in recipes.values())
    if looked_up := net.row_looked_up(node):  # only that is read of a table, and no cache is counted on
        fixed -= recipes["weight"].nbytes
        reads += looked_up * DTYPE_BYTES[dtypes["weight"]]
    price = Price(net.row_flop(node), reads + net.types[node.name].row_bytes, fixed)
    label, why = f"none yet for {node.layer.kind}", "no kernel of this device takes it yet"
    return Claim("", label, (node.name,), price, why, recipes)


def groups_of(net: Network, claims: Sequence[Claim]) -> tuple[Group, ...]:
    group_of = {name: i for i, claim in enumerate(claims) for name in claim.nodes}
    reads: list[dict[str, None]] = [{} for _ in claims]
    read_outside = set(net.outputs)
    for node in net.nodes:
        for value in node.inputs:
            if group_of.get(value) != group_of[node.name]:
                reads[group_of[node.name]][value] = None
                read_outside.add(value)
    return tuple(
        Group(claim, tuple(read), tuple(name for name in claim.nodes if name in read_outside))
        for claim, read in zip(claims, reads, strict=True)
    )


def _no_kernel(net: Network, node: Node, device: Device, refusals: Sequence[Refusal]) -> PlanError:
    reasons = "; ".join(f"{r.kernel}: {r.why}" for r in refusals if r.node == node.name)
    return PlanError(
        f"no kernel of {device.name} takes layer '{node.name}' ({node.layer.kind})",
        got=reasons or f"{', '.join(str(t) for t in net.input_types(node))}",
        expected="a layer that a kernel claims, in a precision that it computes in",
        hint="onchip check MODEL, or another device",
    )
