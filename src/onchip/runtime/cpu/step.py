"""A network with state on the CPU: each run computes its outputs, then replaces the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.threading.launches import Launch
from onchip.network.graph import value_weights
from onchip.network.recipe import Array, Evaluated, Recipe, materialise, reach, value_of
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.plan import Group, Plan


@dataclass(frozen=True)
class _GroupRun:
    """A group, with the weights that stay as they are; its other weights are computed again in each run."""

    group: Group
    weights: Mapping[str, Array]
    changing: Mapping[str, Recipe]
    launch: Launch | None  # None: it is bound in each run, to the run's weights
    done: tuple[str, ...]  # values that no later group needs


class CpuStep:
    """The state is `state`, by name: arrays of its own, which the caller may read and write between runs."""

    def __init__(self, plan: Plan, threads: int) -> None:
        from onchip.kernels.cpu import INFERENCE
        from onchip.kernels.cpu.compiler.compile_ahead import queue_kernels
        from onchip.kernels.cpu.threading.threads import load_helpers, queue_helpers, start_helpers

        self.plan, self.threads, self._start_helpers = plan, threads, start_helpers
        net = plan.network
        self.state = {name: materialise(name, net.weights).copy() for name in net.state}
        self._kernels = {kernel.name: kernel for kernel in INFERENCE}
        queue_kernels(self._kernels[group.claim.kernel] for group in plan.groups if not group.claim.is_view)
        queue_helpers(threads)
        self._as_weights = value_weights(net)
        derived: Evaluated = {}
        last = self._last_uses()
        self._groups = []
        for i, group in enumerate(plan.groups):
            recipes = group.claim.recipes
            changing = {name: recipe for name, recipe in recipes.items() if self._changes(recipe)}
            fixed = {
                name: materialise(recipe, net.weights, derived)
                for name, recipe in recipes.items()
                if name not in changing
            }
            launch = None
            if not (changing or group.claim.is_view):
                launch = self._kernels[group.claim.kernel].bind(group.claim, dict(fixed))
            done = tuple(name for name, at in last.items() if at == i)
            self._groups.append(_GroupRun(group, fixed, changing, launch, done))
        load_helpers(threads)

    def _changes(self, recipe: Recipe) -> bool:
        """Whether a weight is derived from state or from a value."""
        net = self.plan.network
        return any(name in net.state or value_of(weight) for name, weight in reach([recipe], net.weights).items())

    def _last_uses(self) -> dict[str, int]:
        """The group after which a value is not needed, by its name; without those that are needed at the end."""
        net, home = self.plan.network, self.plan.stored_in
        last: dict[str, int] = {}
        for i, group in enumerate(self.plan.groups):
            as_weights = [v for name in group.claim.nodes for v in net.values_as_weights(net.by_name[name])]
            last |= dict.fromkeys((home.get(name, name) for name in (*group.inputs, *group.outputs, *as_weights)), i)
        kept = {home.get(name, name) for name in (*net.inputs, *net.outputs, *net.state.values())}
        return {name: at for name, at in last.items() if name not in kept}

    def run(self, inputs: Mapping[str, Array], B: int) -> dict[str, Array]:
        """Run B rows of the network's inputs, by name; returns its outputs, by name."""
        self._start_helpers(self.threads)
        net, types, home = self.plan.network, self.plan.types, self.plan.stored_in
        values: dict[str, Array] = dict(inputs)
        made = Evaluated()
        made.update(self.state)
        for run in self._groups:
            group = run.group
            for name in (*group.inputs, *group.outputs):
                if name not in values:
                    values[name] = self._array(values, home.get(name, name), types[name], B)
            read, written = ([values[name] for name in names] for names in (group.inputs, group.outputs))
            if group.claim.is_view:
                if not np.shares_memory(read[0], written[0]):
                    written[0].reshape(-1)[...] = read[0].reshape(-1)
            else:
                self._launch(run, made)(read, written, self.threads)
            for name in group.outputs:
                made.update((recipe, values[name][0, ...]) for recipe in self._as_weights.get(name, ()))
            for name in run.done:
                values.pop(name, None)
        for name, value in net.state.items():
            if value:
                self.state[name][...] = values[value][0, ...]
        return {name: values[name] for name in net.outputs}

    @staticmethod
    def _array(values: dict[str, Array], owner: str, kind: TensorType, B: int) -> Array:
        """A new array, or a view of the one that owns its memory."""
        shape = (kind.rows(B), *kind.row_shape)
        if owner in values:
            return values[owner].reshape(shape)
        array = values[owner] = np.empty(shape, numpy_dtype(kind.dtype))
        return array

    def _launch(self, run: _GroupRun, made: Evaluated) -> Launch:
        if run.launch is not None:
            return run.launch
        net = self.plan.network
        changing = {name: materialise(recipe, net.weights, made) for name, recipe in run.changing.items()}
        return self._kernels[run.group.claim.kernel].bind(run.group.claim, {**run.weights, **changing})
