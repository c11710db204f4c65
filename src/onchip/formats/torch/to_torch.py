"""Copy the weights of a trained network back into the torch module that it was loaded from.

The reader slices, joins and transposes parameters, so names do not say where a weight comes from. The module is read
again with the number of every element in place of its value: each element of a weight then names its origin.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from onchip.errors import InputError
from onchip.formats.torch.module import TorchModule, read_with_values, take_module, unwrapped
from onchip.network.graph import Network, Node, check_network, network_attribute
from onchip.network.recipe import Array, materialise
from onchip.network.types import numpy_dtype

MAX_BITS = 24  # of a number that a weight holds
LOAD_AGAIN = "the network of onchip.load(module, example), or the result of its training"


def to_torch(module: Any, trained: Any) -> Any:
    """Copy the weights of a trained network into the torch module that `onchip.load(module, example)` read; return it.

    module   changed in place: the parameters and float buffers that the network has, running statistics included. They
             keep their dtypes and devices; what the network does not have keeps its values, as do counters of batches
    trained  the result of onchip.fit, a training step, or a Network

    Where an LSTM, GRU or RNN adds two biases, a network has their sum: if training changed it, bias_ih receives the
    sum and bias_hh becomes 0. InputError, before anything is changed, for a network of another module, and for trained
    weights that are not elements of the module: constants of its forward, and results of its parameters.
    """
    torch = sys.modules.get("torch")  # a caller with a module has imported torch
    if torch is None or not isinstance(module, torch.nn.Module):
        raise InputError(
            "not a torch module", got=type(module).__name__, expected="a torch.nn.Module",
            hint="onchip.to_torch(module, result)",
        )  # fmt: skip
    attribute = network_attribute(trained)
    net: Network = getattr(trained, attribute) if attribute else trained
    check_network(net)
    owner = unwrapped(torch, module)
    tensors = _float_tensors(owner)
    if not tensors:
        raise _other_module(net, type(owner).__name__, f"weights {', '.join(net.weights)}", "no weights")
    source = _source(torch, owner, net)
    merged = _merged_biases(torch, owner, tensors)
    elements = _Elements(tensors, [net.weight_type(name).dtype for name in net.weights])
    reads = _reads(torch, net, source, elements, merged)
    new, changed = _new_values(net, elements, reads)
    with torch.no_grad():
        for name, tensor in tensors.items():
            part = elements.parts[name]
            _write(torch, tensor, changed[part], new[part])
            if name in merged:
                other, count = merged[name]
                zeroed = changed[part] & (np.arange(tensor.numel()) < count)
                _write(torch, tensors[other], zeroed, np.zeros(tensor.numel()))
    return module


def _float_tensors(module: Any) -> dict[str, Any]:
    """The float parameters and buffers, each once."""
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in every.items() if tensor.is_floating_point()}


def _source(torch: Any, module: Any, net: Network) -> TorchModule:
    """The module with an example of the network's input types."""
    types = {name: (getattr(torch, of.dtype), of.row_shape) for name, of in net.inputs.items()}
    example = {name: torch.zeros(2, *shape, dtype=dtype) for name, (dtype, shape) in types.items()}
    for inputs in (tuple(example.values()), example):
        with contextlib.suppress(InputError):
            source = take_module(module, inputs)
            if source.names == tuple(example):
                return source
    got, expected = f"inputs {', '.join(example)}", "the arguments of its forward"
    raise _other_module(net, type(module).__name__, got, expected)


def _merged_biases(torch: Any, module: Any, tensors: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """bias_ih of every recurrent layer -> its bias_hh, of which so many elements are added to bias_ih."""
    found: dict[str, tuple[str, int]] = {}
    for path, layer in module.named_modules():
        for name, bias in layer.named_parameters(path, recurse=False) if isinstance(layer, torch.nn.RNNBase) else ():
            other = name.replace("bias_ih", "bias_hh")
            if name in tensors and other in tensors and other != name:
                found[name] = other, bias.numel() // 3 * 2 if layer.mode == "GRU" else bias.numel()
    return found


class _Elements:
    """The elements of all tensors, numbered in order, and values by which each is recognised."""

    def __init__(self, tensors: Mapping[str, Any], dtypes: Sequence[str]) -> None:
        """dtypes  of the network's weights"""
        ends = np.cumsum([tensor.numel() for tensor in tensors.values()])
        self.tensors, self.count = tensors, int(ends[-1]) if len(ends) else 0
        self.parts = {
            name: slice(int(end) - tensor.numel(), int(end))
            for (name, tensor), end in zip(tensors.items(), ends, strict=True)
        }
        self.dtypes = {name: numpy_dtype(str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
        read = {numpy_dtype(name) for name in dtypes if "float" in name}
        narrowest = min({*self.dtypes.values(), *read}, key=lambda dtype: ml_dtypes.finfo(dtype).nmant)
        self.base = 2 ** min(MAX_BITS, ml_dtypes.finfo(narrowest).nmant + 1) - 1  # every number below is exact
        # No zeros, which the reader may drop.
        drawn = np.random.default_rng(0).uniform(0.5, 1.5, self.count)
        self.values: Array = drawn.astype(narrowest).astype(np.float64)
        rest, self.digits = np.arange(self.count), list[Array]()  # of the number of each element, from 1
        while not self.digits or rest.any():
            self.digits.append(rest % self.base + 1.0)
            rest = rest // self.base

    def arrays(self, values: Array) -> dict[str, Array]:
        """The tensors with these values of their elements."""
        return {
            name: values[self.parts[name]].reshape(tuple(tensor.shape)).astype(self.dtypes[name])
            for name, tensor in self.tensors.items()
        }

    def find(self, values: Array, digits: Sequence[Array]) -> Array:
        """The numbers of these elements, from 0; -1 for those that are none of the tensors'.

        values, digits  of a weight, read with self.values and with each of self.digits
        """
        number, is_found = np.zeros(values.shape, np.int64), np.ones(values.shape, bool)
        for place, digit in enumerate(digits):
            is_found &= (digit >= 1) & (digit <= self.base) & (digit == np.floor(digit))
            number += (np.where(is_found, digit, 1).astype(np.int64) - 1) * self.base**place
        is_found &= number < self.count
        number[~is_found] = -1
        is_found[is_found] = self.values[number[is_found]] == values[is_found]  # not of another by coincidence: 2 * w
        return np.where(is_found, number, -1)


@dataclass(frozen=True)
class _Reads:
    """The network of a module, read with other values of its elements."""

    now: Network  # the module's own values
    values: Network
    digits: tuple[Network, ...]


def _reads(
    torch: Any, net: Network, source: TorchModule, elements: _Elements, merged: Mapping[str, tuple[str, int]]
) -> _Reads:
    now = np.concatenate([tensor.detach().double().cpu().numpy().ravel() for tensor in elements.tensors.values()])
    probes = [array.copy() for array in (elements.values, *elements.digits)]
    for other, count in merged.values():
        start = elements.parts[other].start
        for values in probes:
            values[start : start + count] = 0
    arrays = [elements.arrays(values) for values in (now, *probes)]
    try:
        with _values_of(torch, source.module, elements):
            reads = read_with_values(source, arrays)
    except InputError as error:
        types = ", ".join(f"{name} {of}" for name, of in net.inputs.items())
        raise _other_module(net, source.name, error.got, f"a module that can be traced with {types}") from error
    return _Reads(reads[0], reads[1], tuple(reads[2:]))


@contextlib.contextmanager
def _values_of(torch: Any, module: Any, elements: _Elements) -> Iterator[None]:
    """Give a module these values for the time of its export, which merges parameters with equal values."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        before = {name: named[name].clone() for name in elements.tensors}
        try:
            for name, part in elements.parts.items():
                named[name].copy_(torch.from_numpy(elements.values[part]).reshape(named[name].shape))
            yield
        finally:
            for name, tensor in before.items():
                named[name].copy_(tensor)


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight of the network, flat and in float64."""

    name: str
    number: Array  # of the elements of the module that its elements are; -1: none
    new: Array
    old: Array  # from the module's own values
    probe: Array  # from other values

    @property
    def strays(self) -> Array:
        """Elements that changed and are none of the module's."""
        return (self.number < 0) & ~_same(self.new, self.old)

    @property
    def is_constant(self) -> bool:
        """Whether those do not depend on the module's values."""
        return bool(_same(self.old, self.probe)[self.strays].all())


def _new_values(net: Network, elements: _Elements, reads: _Reads) -> tuple[Array, Array]:
    """The values of the module's elements in the network, and which of them changed."""
    weights = list(_weights(net, elements, reads))
    new, old, has = np.zeros(elements.count), np.zeros(elements.count), np.zeros(elements.count, bool)
    for weight in weights:
        found = weight.number >= 0
        number = weight.number[found]
        new[number], old[number], has[number] = weight.new[found], weight.old[found], True
    _check_elements(weights, elements, has, reads.now.name)
    _check_agreement(weights, elements, new)
    if not has.any():
        got, expected = f"weights {', '.join(net.weights) or '-'}", f"some of {', '.join(elements.tensors) or '-'}"
        raise _other_module(net, reads.now.name, got, expected)
    return new, has & ~_same(new, old)


def _weights(net: Network, elements: _Elements, reads: _Reads) -> Iterator[_Weight]:
    """The weights of the network, once for each use. InputError for a layer that the module's network has not."""
    for node in net.nodes:
        origin = reads.now.by_name.get(node.name)
        got, expected = (
            _text(net, node),
            _text(reads.now, origin) if origin else f"layers {', '.join(reads.now.by_name)}",
        )
        if node.weights and got != expected:
            raise _other_module(net, reads.now.name, got, expected)
        for role, name in node.weights.items():
            values = _flat(reads.values, node.name, role)
            number = elements.find(values, [_flat(read, node.name, role) for read in reads.digits])
            yield _Weight(name, number, _flat(net, node.name, role), _flat(reads.now, node.name, role), values)


def _text(net: Network, node: Node) -> str:
    shapes = (f"{role} {list(net.weights[name].shape)}" for role, name in node.weights.items())
    return f"layer '{node.name}': {node.layer} with {', '.join(shapes)}"


def _flat(net: Network, node: str, role: str) -> Array:
    return materialise(net.by_name[node].weights[role], net.weights).astype(np.float64).reshape(-1)


def _same(a: Array, b: Array) -> Array:
    """Elementwise; NaN equals NaN."""
    return np.asarray((a == b) | (np.isnan(a) & np.isnan(b)))


def _write(torch: Any, tensor: Any, mask: Array, values: Array) -> None:
    """Replace the elements of the mask by these values; both are flat."""
    here = [torch.from_numpy(array).reshape(tensor.shape).to(tensor.device) for array in (mask, values)]
    tensor.copy_(torch.where(here[0], here[1].to(tensor.dtype), tensor))


# -- errors --------------------------------------------------------------------------------------------------------


def _other_module(net: Network, module: str, got: str, expected: str) -> InputError:
    what = f"network '{net.name}' was not loaded from this module {module}"
    return InputError(what, got=got, expected=expected, hint=LOAD_AGAIN)


def _check_elements(weights: Sequence[_Weight], elements: _Elements, has: Array, module: str) -> None:
    """InputError if training changed an element of a weight that is none of the module's."""
    strays = {weight.name: weight for weight in weights if weight.strays.any()}
    if not strays:
        return
    if all(weight.is_constant for weight in strays.values()):
        got, more = "constants of its forward", "or register them as parameters of the module"
    else:
        left = [name for name, part in elements.parts.items() if not has[part].any()]
        got = f"results of its parameters; the network has no {', '.join(left) or 'single one'}"
        more = "or torch.nn.utils.parametrize.remove_parametrizations before onchip.load"
    names = ",".join(strays)
    raise InputError(
        f"trained weights cannot go back to module {module}: {names}", got=got,
        expected="elements of its parameters and buffers", hint=(f"onchip.fit(..., frozen='{names}')", more),
    )  # fmt: skip


def _check_agreement(weights: Sequence[_Weight], elements: _Elements, new: Array) -> None:
    """InputError if an element of the module has several values in the network."""
    for weight in weights:
        number, value = weight.number[weight.number >= 0], weight.new[weight.number >= 0]
        differs = number[~_same(new[number], value)]
        if differs.size:
            owner = next(name for name, part in elements.parts.items() if part.start <= differs[0] < part.stop)
            names = dict.fromkeys(other.name for other in weights if (other.number == differs[0]).any())
            raise InputError(
                f"parameter '{owner}' has several values in the network",
                got=f"weights {', '.join(names)}, trained apart", expected="one value",
                hint=f"a forward that reads '{owner}' in one layout, or frozen='{','.join(names)}'",
            )  # fmt: skip
