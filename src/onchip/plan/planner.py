"""From a network to a plan: which kernel takes which layers, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.errors import DeviceError, PlanError
from onchip.plan.device import Device
from onchip.plan.kernel import PRECISIONS, Claim, Job, Kernel, Refusal
from onchip.plan.rewrites import rewrite
from onchip.spec.network import Network
from onchip.spec.recipe import Recipe
from onchip.spec.text import columns


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

    @property
    def floor_us(self) -> float:
        return sum(g.claim.price.floor_us(self.device, self.job.precision, self.job.batch) for g in self.groups)

    @property
    def between_bytes(self) -> int:
        """Bytes a row that pass through memory between groups: what fusion did not remove."""
        inside = {value for g in self.groups for value in g.outputs} - set(self.network.outputs)
        return sum(self.network.types[value].row_bytes for value in inside)

    @property
    def rewrite_flop(self) -> int:
        """What the weights that rewrites derived cost, once, when an engine is built."""
        used = {name for node in self.network.nodes for name in node.weights.values()}
        return sum(w.flop for name in used if isinstance(w := self.network.weights[name], Recipe))

    def to_dict(self) -> dict[str, object]:
        return {
            "network": self.network.name,
            "device": self.device.name,
            "precision": self.job.precision,
            "batch": self.job.batch,
            "job": "train" if self.job.is_training else "infer",
            "floor_us": self.floor_us,
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
                    "why": g.claim.why,
                }
                for g in self.groups
            ],
            "rewrite_flop": self.rewrite_flop,
            "rewrites": list(self.rewrites),
            "refusals": [{"kernel": r.kernel, "layer": r.node, "why": r.why} for r in self.refusals],
        }

    def __str__(self) -> str:
        head = ["group", "layers", "kernel", "on chip", "bytes/row", "flop/row", "floor", "why"]
        rows = []
        for i, group in enumerate(self.groups):
            claim, nodes = group.claim, group.claim.nodes
            layers = nodes[0] if len(nodes) == 1 else f"{nodes[0]}..{nodes[-1]}"
            floor = claim.price.floor_us(self.device, self.job.precision, self.job.batch)
            sizes = f"{claim.fast_bytes / 1024:.0f} KiB", f"{claim.price.row_bytes:,}", f"{claim.price.row_flop:,}"
            rows.append([str(i), layers, claim.label, *sizes, format_us(floor), claim.why])
        work = f"train, {self.job.loss}" if self.job.is_training else "infer"
        lines = [f"{self.network.name} on {self.device.name}, {self.job.precision}, {work}, {self.job.batch:,} rows"]
        lines.append(columns(head, rows, right=(3, 4, 5, 6)))
        weight_bytes = sum(group.claim.weight_bytes for group in self.groups)
        build_flop = sum(group.claim.build_flop for group in self.groups) + self.rewrite_flop
        weights = f"{weight_bytes / 1024:,.0f} KiB of weights, {build_flop:,} flop to build them"
        lines.append(f"floor {format_us(self.floor_us)}, {self.between_bytes} B/row between groups, {weights}")
        lines += [f"rewrote: {line}" for line in self.rewrites]
        lines += [f"refused: {r.kernel} at {r.node}: {r.why}" for r in self.refusals]
        return "\n".join(lines)


def format_us(us: float) -> str:
    if us < 1000:
        return f"{us:.1f} µs"
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def make_plan(net: Network, device: Device, kernels: Sequence[Kernel], job: Job | None = None) -> Plan:
    """Cover the network with kernel claims at the lowest total floor. Computes no weight, touches no device.

    Groups are runs of the network's order, so the cheapest cover is a shortest path: best[i] is the
    cheapest way to run nodes i.. and each claim at i leads to the node behind its last one.
    """
    job = job or Job()
    if job.precision not in device.flops:
        known = job.precision in PRECISIONS
        raise (DeviceError if known else PlanError)(
            f"{device.name} does not compute in {job.precision}",
            got=job.precision,
            expected=", ".join(device.flops),
            hint=f"precision {next(iter(device.flops))}",
        )
    net, rewritten = (net, ()) if job.is_training else rewrite(net)
    count = len(net.nodes)
    best: list[tuple[float, Claim | None]] = [(0.0 if i == count else float("inf"), None) for i in range(count + 1)]
    refusals: list[Refusal] = []
    for start in reversed(range(count)):
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
                    continue
                cost = answer.price.floor_us(device, job.precision, job.batch) + best[start + len(answer.nodes)][0]
                if cost < best[start][0]:
                    best[start] = (cost, answer)
    groups = []
    at = 0
    while at < count:
        claim = best[at][1]
        if claim is None:
            raise _no_kernel(net, at, device, refusals)
        groups.append(_group(net, claim))
        at += len(claim.nodes)
    planned = {group.claim.nodes[0] for group in groups}
    told = tuple(r for r in reversed(refusals) if r.node in planned)
    return Plan(net, device, job, tuple(groups), rewritten, told)


def _group(net: Network, claim: Claim) -> Group:
    names = set(claim.nodes)
    members = [node for node in net.nodes if node.name in names]
    reads = dict.fromkeys(value for node in members for value in node.inputs if value not in names)
    outside = {value for node in net.nodes if node.name not in names for value in node.inputs} | set(net.outputs)
    return Group(claim, tuple(reads), tuple(node.name for node in members if node.name in outside))


def _no_kernel(net: Network, at: int, device: Device, refusals: Sequence[Refusal]) -> PlanError:
    node = net.nodes[at]
    reasons = "; ".join(f"{r.kernel}: {r.why}" for r in refusals if r.node == node.name)
    return PlanError(
        f"no kernel of {device.name} takes layer '{node.name}' ({node.layer.kind})",
        got=reasons or f"{', '.join(str(t) for t in net.input_types(node))}",
        expected="a layer that a kernel claims, in a precision that it computes in",
        hint="onchip check MODEL, or another device",
    )
