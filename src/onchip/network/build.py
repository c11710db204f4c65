"""Network builders: a chain of layers, an MLP with seeded weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from onchip.errors import InputError
from onchip.files import check_memory
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, Layer, Linear
from onchip.network.names import known_name
from onchip.network.reading import show
from onchip.network.recipe import Weight
from onchip.network.types import BATCH, TensorType

MAX_DEPTH = 1 << 10  # layers of a new network
MAX_PARAMETERS = 1 << 27  # of a new network: 512 MiB
MAX_WIDTH = 1 << 18  # of its layers: each row of a batch has buffers this wide
_COPIES = 5  # of the weights: initial, trained, gradients, two optimiser states


def sequential(
    input_type: TensorType,
    layers: Sequence[tuple[str, Layer]],
    weights: Mapping[str, Weight],
    *,
    name: str = "network",
) -> Network:
    """A chain: each layer reads the previous one. Its weights are named '<layer name>.<role>'."""
    nodes, value = [], "x"
    for node_name, layer in layers:
        roles = {r: f"{node_name}.{r}" for r in (*layer.required, *layer.optional) if f"{node_name}.{r}" in weights}
        nodes.append(Node(node_name, layer, (value,), roles))
        value = node_name
    return Network({"x": input_type}, tuple(nodes), (value,), weights, name)


def mlp(
    *widths: int,
    activation: str = "ReLU",
    output: str | None = None,
    bias: bool = True,
    seed: int = 0,
    name: str = "mlp",
) -> Network:
    """Linear layers of these widths with `activation` between them and `output` (if any) at the end.

    Weights are He-initialised so that another framework can repeat them:
    `rng = numpy.random.default_rng(seed)`; then for each layer, first to last,
    `rng.standard_normal((D_out, D_in), dtype=float32) * float32(sqrt(2 / D_in))`; biases are zero.
    """
    if len(widths) < 2 or any(not isinstance(w, int | np.integer) or w < 1 for w in widths):
        raise InputError(
            "bad widths", got=show(widths), expected="two or more, each at least 1", hint="784, 320, 160, 10"
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError("bad seed", got=show(seed), expected="an integer of at least 0", hint="seed=0")
    widths = tuple(map(int, widths))
    _check_size(widths)
    rng = np.random.default_rng(seed)
    layers: list[tuple[str, Layer]] = []
    weights: dict[str, Weight] = {}
    for i, (D_in, D_out) in enumerate(pairwise(widths), start=1):
        weights[f"fc{i}.weight"] = rng.standard_normal((D_out, D_in), dtype=np.float32) * np.float32(np.sqrt(2 / D_in))
        if bias:
            weights[f"fc{i}.bias"] = np.zeros(D_out, np.float32)
        layers.append((f"fc{i}", Linear()))
        kind = activation if i < len(widths) - 1 else output
        if kind is not None:
            layer = make_layer(kind)
            layers.append((f"{layer.kind.lower()}{i}", layer))
    return sequential(TensorType((BATCH, widths[0])), layers, weights, name=name)


def _check_size(widths: Sequence[int]) -> None:
    """InputError before drawing weights that would take minutes or more than the available memory."""
    if len(widths) - 1 > MAX_DEPTH:
        got, expected = f"{len(widths) - 1:,} layers", f"at most {MAX_DEPTH:,}"
        raise InputError("the network is too deep", got=got, expected=expected, hint="fewer hidden layers")
    if any(width > MAX_WIDTH for width in widths[1:]):
        got, expected = f"widths {show(widths)}", f"widths of at most {MAX_WIDTH:,}"
        raise InputError("the network is too large", got=got, expected=expected, hint="smaller hidden widths")
    parameters = sum((int(D_in) + 1) * int(D_out) for D_in, D_out in pairwise(widths))
    if parameters > MAX_PARAMETERS:
        got, expected = f"widths {show(widths)}", f"at most {MAX_PARAMETERS:,} parameters"
        raise InputError("the network is too large", got=got, expected=expected, hint="smaller hidden widths")
    check_memory(parameters * 4 * _COPIES, "the network")


def make_layer(kind: str, **attributes: object) -> Layer:
    """A layer by its name, as files and options spell it."""
    kind = known_name(kind, sorted(LAYERS), "layer")
    try:
        return LAYERS[kind](**attributes)
    except TypeError:
        raise InputError(f"bad attributes for layer {kind}", got=", ".join(attributes) or "none") from None
