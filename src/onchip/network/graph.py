"""Network: a frozen graph of layers over named values and named weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from onchip.errors import InputError, ShapeError, printable
from onchip.network.layers import Layer, StepLayer
from onchip.network.meaning import Meaning
from onchip.network.recipe import Recipe, Weight, in_order, reach, value_of
from onchip.network.text import columns, escaped, html_table
from onchip.network.training import TrainingStep
from onchip.network.types import DTYPE_BYTES, TensorType

_LINES_SHOWN = 10  # of a long network, at each end


@dataclass(frozen=True)
class Node:
    """One layer in the graph: its inputs and weights. Its output value has its name."""

    name: str
    layer: Layer
    inputs: tuple[str, ...]
    weights: Mapping[str, str] = field(default_factory=dict)  # role -> name of the weight

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))

    def __reduce__(self) -> tuple[object, ...]:
        """For copy and pickle, which reject a MappingProxyType."""
        return Node, (self.name, self.layer, self.inputs, dict(self.weights))


@dataclass(frozen=True, eq=False)
class TrainedStep:
    """What the nodes of a training step compute together, for kernels that run a whole step without reading them."""

    network: Network
    how: TrainingStep
    # Weights decay by the step's weight_decay; or those by name, each by its factor of that.
    decays: bool | Mapping[str, float] = False
    frozen: tuple[str, ...] = ()  # the weights of the network that are not to be trained


@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """What to compute, never how. Validated on construction."""

    inputs: Mapping[str, TensorType]
    nodes: tuple[Node, ...]  # in topological order: every value is computed before it is read
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight]
    name: str = "network"
    meaning: Meaning = Meaning()  # noqa: RUF009 - frozen
    # Weights that change from run to run -> the value that replaces each after a run; "": set by the caller.
    state: Mapping[str, str] = field(default_factory=dict)
    trained: TrainedStep | None = None  # set: all nodes together are this step of training
    types: Mapping[str, TensorType] = field(init=False)  # of every value, derived

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        object.__setattr__(self, "weights", MappingProxyType({n: _read_only(w) for n, w in self.weights.items()}))
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "state", MappingProxyType(dict(self.state)))
        object.__setattr__(self, "types", MappingProxyType(self._infer_types()))
        self._check_state()

    def __reduce__(self) -> tuple[object, ...]:
        parts = dict(self.inputs), self.nodes, self.outputs, dict(self.weights), self.name, self.meaning
        return Network, (*parts, dict(self.state), self.trained)

    # -- queries -------------------------------------------------------------------------------------------

    def weight_type(self, name: str) -> TensorType:
        if name not in self._weight_types:
            weight = self.weights[name]
            self._weight_types[name] = TensorType(weight.shape, _dtype_of(weight))
        return self._weight_types[name]

    @functools.cached_property
    def _weight_types(self) -> dict[str, TensorType]:
        return {}  # filled on demand

    def node_weight_types(self, node: Node) -> dict[str, TensorType]:
        return {role: self.weight_type(name) for role, name in node.weights.items()}

    def input_types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.types[name] for name in node.inputs)

    @functools.cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @functools.cached_property
    def kept(self) -> frozenset[str]:
        """The values that are needed outside the graph's edges: outputs, weights that nodes compute, and new state."""
        return frozenset((*self.outputs, *self._computed_weights, *filter(None, self.state.values())))

    def nodes_from(self, start: int) -> Iterator[Node]:
        """net.nodes[start:] without a copy, for callers that stop early."""
        return (self.nodes[i] for i in range(start, len(self.nodes)))

    def readers(self, value: str) -> list[Node]:
        """The nodes that read a value, each once."""
        return self._readers.get(value, [])

    @functools.cached_property
    def _readers(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node)
        return found

    def values_as_weights(self, node: Node) -> list[str]:
        """The values that a node's weights are, or are derived from."""
        if not self._computed_weights:
            return []
        names = [name for name in node.weights.values() if isinstance(self.weights[name], Recipe)]
        return [value for weight in reach(names, self.weights).values() if (value := value_of(weight))]

    def origins(self, weight: str | Recipe) -> list[str | Recipe]:
        """What a weight is derived from: arrays, by name, and values (value_weight)."""
        found = reach([weight], self.weights).items()
        return [name for name, each in found if not isinstance(each, Recipe) or not each.sources]

    def changes(self, weight: str | Recipe) -> bool:
        """Whether a weight differs from run to run: derived from state, or from a value."""
        return any(name in self.state or value_of(self._weight(name)) for name in self.origins(weight))

    def _weight(self, name: str | Recipe) -> Weight:
        return name if isinstance(name, Recipe) else self.weights[name]

    @functools.cached_property
    def _computed_weights(self) -> dict[str, list[Recipe]]:
        return value_weights(self)

    def row_flop(self, node: Node) -> int:
        if node.name not in self._row_flop:
            self._row_flop[node.name] = node.layer.row_flop(self.input_types(node), self.node_weight_types(node))
        return self._row_flop[node.name]

    @functools.cached_property
    def _row_flop(self) -> dict[str, int]:
        return {}  # filled on demand

    def row_lookup_elements(self, node: Node) -> int:
        return node.layer.row_lookup_elements(self.input_types(node), self.node_weight_types(node))

    @property
    def parameters(self) -> int:
        """The number of weight elements that the layers use."""
        used = {name for node in self.nodes for name in node.weights.values()}
        return sum(math.prod(self.weights[name].shape) for name in used)

    @property
    def weight_bytes(self) -> int:
        return sum(map(self.weight_bytes_of, {name for node in self.nodes for name in node.weights.values()}))

    def weight_bytes_of(self, name: str) -> int:
        return math.prod(self.weights[name].shape) * DTYPE_BYTES[self.weight_type(name).dtype]

    @property
    def input(self) -> TensorType:
        """The type of the only input."""
        if len(self.inputs) != 1:
            raise InputError(f"network '{self.name}' has {len(self.inputs)} inputs", expected="one")
        return next(iter(self.inputs.values()))

    @property
    def output(self) -> TensorType:
        """The type of the only output."""
        if len(self.outputs) != 1:
            raise InputError(f"network '{self.name}' has {len(self.outputs)} outputs", expected="one")
        return self.types[self.outputs[0]]

    # -- changed copies ------------------------------------------------------------------------------------

    def replace(
        self,
        *,
        nodes: Iterable[Node] | None = None,
        outputs: Iterable[str] | None = None,
        weights: Mapping[str, Weight] | None = None,
        name: str | None = None,
        meaning: Meaning | None = None,
    ) -> Network:
        """The same network with some parts replaced, validated again. Of a training step, only the name can be replaced
        without losing `trained`."""
        is_renamed = nodes is None and outputs is None and weights is None
        return Network(
            self.inputs,
            self.nodes if nodes is None else tuple(nodes),
            self.outputs if outputs is None else tuple(outputs),
            self.weights if weights is None else weights,
            self.name if name is None else name,
            self.meaning if meaning is None else meaning,
            self.state,
            self.trained if is_renamed else None,
        )

    # -- checks --------------------------------------------------------------------------------------------

    def _infer_types(self) -> dict[str, TensorType]:
        types = dict(self.inputs)
        if not types:
            raise InputError(f"network '{self.name}' has no input")
        for name, tensor_type in types.items():
            if not tensor_type.is_batched:
                raise ShapeError(f"input '{name}' has no batch axis", got=str(tensor_type), expected="[B, ...]")
        for node in self.nodes:
            if node.name in types:
                raise InputError(f"two values are called '{node.name}' in network '{self.name}'")
            types[node.name] = self._infer_node(node, types)
        if not self.outputs:
            raise InputError(f"network '{self.name}' has no output")
        for output in self.outputs:
            if output not in types:
                raise InputError(f"output '{output}' is computed by no layer", expected=f"one of {', '.join(types)}")
        return types

    def _check_state(self) -> None:
        for name, value in self.state.items():
            weight = self.weights.get(name)
            if weight is None or isinstance(weight, Recipe):
                got = "no weight" if weight is None else "a derived weight"
                raise InputError(f"state '{name}' is not an array of the network", got=got, expected="an array")
            if not value:
                continue
            expected = TensorType((1, *weight.shape), self.weight_type(name).dtype)
            if self.types.get(value) != expected:
                got = str(self.types.get(value, "no such value"))
                raise ShapeError(f"'{value}' cannot replace state '{name}'", got=got, expected=str(expected))

    def _infer_node(self, node: Node, types: Mapping[str, TensorType]) -> TensorType:
        layer, where = node.layer, f"layer '{node.name}' ({node.layer.kind})"
        for value in node.inputs:
            if value not in types:
                raise InputError(f"{where} reads '{value}', which no earlier layer computes", expected=", ".join(types))
        if not node.inputs or layer.arity not in (None, len(node.inputs)):
            expected = "at least 1" if layer.arity is None else str(layer.arity)
            raise InputError(f"{where}: wrong number of inputs", got=str(len(node.inputs)), expected=expected)
        missing = [role for role in layer.required if role not in node.weights]
        unknown = [role for role in node.weights if role not in (*layer.required, *layer.optional)]
        if missing or unknown:
            raise InputError(
                f"{where}: wrong weights", got=", ".join(node.weights) or "none",
                expected=", ".join((*layer.required, *(f"[{role}]" for role in layer.optional))) or "none",
            )  # fmt: skip
        for weight in node.weights.values():
            if weight not in self.weights:
                raise InputError(f"{where}: weight '{weight}' is not in the network")
            self._check_computed(weight, types, where)
        read = [types[value] for value in node.inputs]
        if len({tensor_type.is_batched for tensor_type in read}) > 1:
            got = ", ".join(map(str, read))
            raise ShapeError(f"{where} mixes a batch with values of one row", got=got, expected="one kind")
        arrays = {role: self.weights[name] for role, name in node.weights.items()}
        try:
            output_type = layer.infer(tuple(read), self.node_weight_types(node))
            if not read[0].is_batched:
                output_type = TensorType((1, *output_type.shape[1:]), output_type.dtype)
            layer.check_weights({role: array for role, array in arrays.items() if not isinstance(array, Recipe)})
            return output_type
        except InputError as error:
            what = f"{where}: {error.what}"
            raise type(error)(what, got=error.got, expected=error.expected, hint=error.hint) from None

    def _check_computed(self, weight: str, types: Mapping[str, TensorType], where: str) -> None:
        """The values that a weight is computed from must be there, as one row of its shape."""
        for source in reach([weight], self.weights).values() if isinstance(self.weights[weight], Recipe) else ():
            value = value_of(source)
            if value and types.get(value) != TensorType((1, *source.shape), _dtype_of(source)):
                got = str(types.get(value, "no earlier layer computes it"))
                expected = f"one row of {list(source.shape)}"
                raise ShapeError(
                    f"{where} has the weight '{value}', a value of the network", got=got, expected=expected
                )

    # -- printing ------------------------------------------------------------------------------------------

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[name, "input", "", str(tensor_type), "", ""] for name, tensor_type in self.inputs.items()]
        for node in self.nodes:
            params = sum(math.prod(self.weights[w].shape) for w in node.weights.values())
            rows.append([node.name, str(node.layer), ", ".join(node.inputs), str(self.types[node.name]),
                         f"{params:,}" if params else "", f"{self.row_flop(node):,}"])  # fmt: skip
        return ["layer", "kind", "reads", "output", "parameters", "flop/row"], rows

    def _summary(self) -> str:
        flop = sum(map(self.row_flop, self.nodes))
        outputs = printable(", ".join(self.outputs))
        return f"{printable(self.name)}: {self.parameters:,} parameters, {flop:,} flop/row, output {outputs}"

    def __str__(self) -> str:
        return f"{self._summary()}\n{columns(*self._table(), right=(4, 5))}"

    def __repr__(self) -> str:
        """As printed; only the first and last layers of a long network."""
        head, rows = self._table()
        if (more := len(rows) - 2 * _LINES_SHOWN) > 1:
            rows[_LINES_SHOWN:-_LINES_SHOWN] = [["...", f"{more:,} more", "", "", "", ""]]
        return f"Network {self._summary()}\n{columns(head, rows, right=(4, 5))}"

    def _repr_html_(self) -> str:
        return f"<p>{escaped(self._summary())}</p>{html_table(*self._table())}"


def value_weights(net: Network) -> dict[str, list[Recipe]]:
    """The values that serve as weights, each with its recipes (value_weight)."""
    found: dict[str, list[Recipe]] = {}
    used = [name for node in net.nodes for name in node.weights.values()]
    for weight in reach(used, net.weights).values():
        if isinstance(weight, Recipe) and (value := value_of(weight)):
            found.setdefault(value, []).append(weight)
    return found


def changing_weights(weights: Iterable[str | Recipe], net: Network) -> list[Recipe]:
    """The recipes among these weights and their sources that are computed in each run, sources first."""
    found: dict[str | Recipe, Recipe] = {}
    for name in in_order(weights, net.weights):
        weight = name if isinstance(name, Recipe) else net.weights[name]
        if not isinstance(weight, Recipe):
            continue
        if value_of(weight) or any(source in net.state or source in found for source in weight.sources):
            found[name] = weight
    return list(found.values())


def check_network(net: object) -> None:
    """InputError if it is not a Network whose outputs depend on its inputs alone.

    For an estimator or a training result, the hint names its attribute.
    """
    if not isinstance(net, Network):
        hint = f"its .{attribute}" if (attribute := network_attribute(net)) else "onchip.load(...)"
        raise InputError("not a network", got=type(net).__name__, expected="Network", hint=hint)
    check_no_step(net)


def check_no_step(net: Network) -> None:
    """InputError for a training step: it has state, which each run replaces, or layers that only a step has."""
    step = next((node for node in net.nodes if isinstance(node.layer, StepLayer)), None)
    if step is None and not net.state:
        return
    got = f"layer '{step.name}' ({step.layer.kind})" if step else f"a network with the state '{next(iter(net.state))}'"
    raise InputError(
        f"network '{net.name}' is a training step", got=got, expected="a network without state and step layers",
        hint="the network that it trains; onchip.fit(net, x, y) writes and runs its steps",
    )  # fmt: skip


def network_attribute(holder: object) -> str:
    """The attribute of an estimator or a training result that is its network; "" if there is none."""
    return next((name for name in ("network_", "network") if isinstance(getattr(holder, name, None), Network)), "")


def _dtype_of(weight: Weight) -> str:
    return weight.dtype if isinstance(weight, Recipe) else weight.dtype.name


def _read_only(weight: Weight) -> Weight:
    """A read-only view. No copy: weights may be large, so the owner of the array must not change it."""
    if isinstance(weight, np.ndarray):
        weight = weight.view()
        weight.flags.writeable = False
    return weight
