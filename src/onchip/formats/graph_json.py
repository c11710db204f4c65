"""The graph of a network as JSON, stored with the weights in a .safetensors file.

{"version": 1, "name": "mlp",
 "inputs":  [{"name": "x", "shape": ["B", 784], "dtype": "float32"}],
 "nodes":   [{"name": "fc1", "kind": "Linear", "attributes": {}, "inputs": ["x"],
              "weights": {"weight": "fc1.weight", "bias": "fc1.bias"}}],
 "outputs": ["fc1"]}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from onchip.errors import FormatError
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, Layer
from onchip.network.layers.select import MAX_INDICES
from onchip.network.names import did_you_mean
from onchip.network.reading import MAX_DIM, MAX_RANK, is_text, show
from onchip.network.recipe import Weight
from onchip.network.types import TensorType

FORMAT_VERSION = 1

T = TypeVar("T")


def graph_to_json(net: Network) -> str:
    return json.dumps({
        "version": FORMAT_VERSION,
        "name": net.name,
        "inputs": [{"name": name, "shape": kind.shape, "dtype": kind.dtype} for name, kind in net.inputs.items()],
        "nodes": [
            {
                "name": node.name, "kind": node.layer.kind, "attributes": _attributes(node.layer),
                "inputs": node.inputs, "weights": dict(node.weights),
            }
            for node in net.nodes
        ],
        "outputs": net.outputs,
    })  # fmt: skip


def _attributes(layer: Layer) -> dict[str, Any]:
    """Attributes as declared by the layer's fields: 6 and 6.0 give the same text."""
    found = layer.attributes()
    for key in _real_fields(type(layer)) & found.keys():
        found[key] = float(found[key]) if type(found[key]) is int else found[key]
    nested = {key: value for key, value in found.items() if isinstance(value, Layer)}
    return found | {key: {"kind": of.kind, "attributes": _attributes(of)} for key, of in nested.items()}


@functools.cache
def _real_fields(cls: type[Layer]) -> frozenset[str]:
    return frozenset(name for name, hint in typing.get_type_hints(cls).items() if hint in (float, float | None))


def graph_from_json(
    text: str, weights: Mapping[str, Weight], layers: Mapping[str, type[Layer]] = LAYERS,
    state: Mapping[str, str] | None = None,
) -> Network:  # fmt: skip
    """Build the network of this graph and these weights; FormatError if the JSON is not such a graph.

    layers  that it may have, by kind
    """
    graph = _need(dict, parse_json(text, "the graph"), "the graph")
    check_keys(graph, ("version", "name", "inputs", "nodes", "outputs"), "the graph")
    version = graph.get("version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise FormatError(
            "unsupported version of the graph", got=f"version {show(version)}", expected=f"version {FORMAT_VERSION}",
            hint="a newer onchip, or save the network again with this version",
        )  # fmt: skip
    inputs: dict[str, TensorType] = {}
    for entry in _list(graph, "inputs", "the graph"):
        name = _field(str, entry, "name", "an input")
        check_keys(entry, ("name", "shape", "dtype"), f"input '{name}'")
        if name in inputs:
            raise FormatError(f"two inputs are called '{name}'")
        inputs[name] = _tensor_type(entry, f"input '{name}'")
    nodes = tuple(_node(entry, layers) for entry in _list(graph, "nodes", "the graph"))
    outputs = tuple(_need(str, output, "an output") for output in _list(graph, "outputs", "the graph"))
    return Network(inputs, nodes, outputs, weights, _field(str, graph, "name", "the graph"), state=state or {})


def parse_json(text: str, where: str, start: int | None = None) -> object:
    """Parse JSON without repeated keys; `start` is its offset in the file, for the message."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        position = "" if start is None else f" at byte {start + error.pos}"
        raise FormatError(f"{where} is not JSON", got=f"{error.msg}{position}", expected="JSON") from None
    except RecursionError:
        raise FormatError(f"{where} is nested too deeply", expected="a few levels of JSON") from None
    except FormatError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise FormatError(f"{where} is not usable JSON", got=str(error)) from None


def check_keys(entry: Mapping[str, object], known: Sequence[str], where: str) -> None:
    """Raise FormatError for an unknown key, which would be ignored."""
    if unknown := next((key for key in entry if key not in known), None):
        hint = did_you_mean(unknown, known)
        raise FormatError(f"{where} has an unknown key", got=show(unknown), expected=", ".join(known), hint=hint)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"the key {show(repeated)} occurs twice in one JSON object", expected="unique keys")
    return result


def _node(entry: Any, layers: Mapping[str, type[Layer]]) -> Node:
    name = _field(str, entry, "name", "a node")
    where = f"layer '{name}'"
    check_keys(entry, ("name", "kind", "attributes", "inputs", "weights"), where)
    weights = _field(dict, entry, "weights", where)
    return Node(
        name,
        _layer(entry, layers, where),
        tuple(_need(str, value, f"{where}: an input") for value in _list(entry, "inputs", where)),
        {role: _need(str, weight, f"{where}: weight '{role}'") for role, weight in weights.items()},
    )


def _layer(entry: object, layers: Mapping[str, type[Layer]], where: str) -> Layer:
    """A layer of its kind and attributes."""
    kind, attributes = _field(str, entry, "kind", where), _field(dict, entry, "attributes", where)
    if kind not in layers:
        raise FormatError(
            f"{where} has an unknown kind", got=show(kind), expected=", ".join(sorted(layers)),
            hint=did_you_mean(kind, layers) or "a newer onchip",
        )  # fmt: skip
    cls = layers[kind]
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := [key for key in attributes if key not in known]:
        raise FormatError(
            f"{where} ({kind}): unknown attributes", got=show(", ".join(unknown)), expected=", ".join(known) or "none",
            hint=did_you_mean(unknown[0], known),
        )  # fmt: skip
    fields = dataclasses.fields(cls)
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in attributes]:
        raise FormatError(f"{where} ({kind}) has no '{missing[0]}'", got=show(", ".join(attributes)) or "nothing")
    hints = typing.get_type_hints(cls)
    nested = {key: hint for key, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Layer)}
    return cls(**{
        key: _nested(nested[key], _layer(value, layers, f"{where}: {key}"), f"{where} ({kind}): {key}") if key in nested
        else _as_declared(value, hints[key], f"{where} ({kind}): {key}")
        for key, value in attributes.items()
    })  # fmt: skip


def _nested(kind: type[Layer], layer: Layer, where: str) -> Layer:
    if not isinstance(layer, kind):
        raise FormatError(f"{where} has an invalid value", got=layer.kind, expected=kind.__name__)
    return layer


def _as_declared(value: object, hint: Any, where: str) -> object:
    """Convert a JSON value to the type of a layer's field: lists become tuples, 1 is accepted for 1.0."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal and value in inner:
        return value
    if origin in (typing.Union, types.UnionType):
        for choice in inner:
            try:
                return _as_declared(value, choice, where)
            except FormatError:
                continue
    if origin is tuple and isinstance(value, list):
        each = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        if len(each) == len(value) <= MAX_INDICES:
            return tuple(_as_declared(v, h, where) for v, h in zip(value, each, strict=True))
    if hint in (int, float) and type(value) is int and abs(value) <= MAX_DIM:
        return hint(value)
    if hint in (float, bool, str, types.NoneType) and type(value) is hint:
        return value
    expected = hint.__name__ if isinstance(hint, type) and not inner else str(hint).replace("typing.", "")
    raise FormatError(f"{where} has an invalid value", got=show(value), expected=expected)


def _tensor_type(entry: object, where: str) -> TensorType:
    shape = _list(entry, "shape", where)
    for dim in shape:
        if not isinstance(dim, str) and (type(dim) is not int or not 0 <= dim <= MAX_DIM):
            raise FormatError(f"{where} has a bad shape", got=show(shape), expected="['B', sizes...]")
    if len(shape) > MAX_RANK:
        raise FormatError(f"{where} has too many axes", got=str(len(shape)), expected=f"at most {MAX_RANK}")
    return TensorType(tuple(shape), _field(str, entry, "dtype", where))


def _field(kind: type[T], entry: object, key: str, where: str) -> T:
    entry = _need(dict, entry, where)
    if key not in entry:
        raise FormatError(f"{where} has no '{key}'", got=show(", ".join(entry)) if entry else "nothing")
    return _need(kind, entry[key], f"{where}: '{key}'")


def _list(entry: object, key: str, where: str) -> list[Any]:
    return _field(list, entry, key, where)


def _need(kind: type[T], value: object, where: str) -> T:
    if not isinstance(value, kind):
        expected = {"dict": "an object", "list": "a list", "str": "a string"}[kind.__name__]
        raise FormatError(f"{where} has the wrong type", got=show(value), expected=expected)
    if isinstance(value, str) and not is_text(value):
        raise FormatError(f"{where} is not valid text", got=show(value), expected="valid Unicode")
    return value
