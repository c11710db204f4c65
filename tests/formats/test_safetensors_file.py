"""Files read back bit-identical, by onchip and by the safetensors library; bad files are refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.errors import FormatError, InputError, OnchipError, OutputError
from onchip.files import MAX_HEADER_BYTES
from onchip.formats.graph_json import graph_to_json
from onchip.formats.weights.safetensors_file import read_safetensors, write_safetensors
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import LAYERS, Embedding, Layer, Linear, ReLU, Reshape, Softmax
from onchip.network.recipe import Recipe
from onchip.network.types import DTYPE_BYTES, TensorType, numpy_dtype
from takers import doubled

SETTINGS = settings(max_examples=60)


def assert_same(got: Network, expected: Network) -> None:
    assert (got.name, got.inputs, got.nodes, got.outputs) == (
        expected.name, expected.inputs, expected.nodes, expected.outputs,
    )  # fmt: skip
    for name, array in expected.weights.items():
        assert got.weights[name].dtype == array.dtype
        assert got.weights[name].shape == array.shape
        assert got.weights[name].tobytes() == array.tobytes()


def container(header, data=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def graph(**changes):
    """The JSON graph of a Linear over the tensor 'w', with some entries replaced."""
    return {
        "version": 1, "name": "n", "inputs": [{"name": "x", "shape": ["B", 2], "dtype": "float32"}],
        "nodes": [{"name": "fc", "kind": "Linear", "attributes": {}, "inputs": ["x"], "weights": {"weight": "w"}}],
        "outputs": ["fc"], **changes,
    }  # fmt: skip


def node(**changes):
    return [{**graph()["nodes"][0], **changes}]


def file_of(a_graph, tensors=None, data=bytes(24)) -> bytes:
    tensors = {"w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}} if tensors is None else tensors
    text = a_graph if isinstance(a_graph, str) else json.dumps(a_graph)
    return container({"__metadata__": {"onchip": text}, **tensors}, data)


def read_bytes(tmp_path, data: bytes) -> Network:
    path = tmp_path / "net.safetensors"
    path.write_bytes(data)
    return read_safetensors(path)


# -- round trips -------------------------------------------------------------------------------------------


@SETTINGS
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    activation=st.sampled_from(["ReLU", "Tanh", "Sigmoid"]),
    output=st.sampled_from([None, "Softmax", "LogSoftmax"]),
    bias=st.booleans(),
    name=st.text(st.characters(codec="utf-8"), max_size=8),
)
def test_round_trip_of_any_mlp(tmp_path, widths, activation, output, bias, name):
    net = mlp(*widths, activation=activation, output=output, bias=bias, name=name)
    write_safetensors(net, tmp_path / "net.safetensors")
    assert_same(read_safetensors(tmp_path / "net.safetensors"), net)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_keeps_its_bits_and_the_library_agrees(tmp_path, dtype):
    from safetensors import safe_open
    from safetensors.numpy import load_file

    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 12 * DTYPE_BYTES[dtype], dtype=np.uint8)
    odd = np.ones((2, 4), np.float16)  # next to a narrower tensor
    weights = {"a.weight": odd, "b.weight": bits.view(numpy_dtype(dtype)).reshape(6, 2)}
    nodes = (
        Node("a", Linear(), ("x",), {"weight": "a.weight"}),
        Node("b", Embedding(), ("ids",), {"weight": "b.weight"}),
    )
    inputs = {"x": TensorType(("B", 4)), "ids": TensorType(("B",), "int64")}
    net = Network(inputs, nodes, ("a", "b"), weights)
    path = tmp_path / "net.safetensors"
    write_safetensors(net, path)
    back = read_safetensors(path)
    assert_same(back, net)
    assert not back.weights["b.weight"].flags.writeable
    assert back.weights["b.weight"].flags.aligned
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == {"a.weight", "b.weight"}
        assert file.get_slice("b.weight").get_shape() == [6, 2]
        assert json.loads(file.metadata()["onchip"])["version"] == 1
    if "8" not in dtype or "int" in dtype:  # the library has no NumPy dtype for float8
        assert load_file(path)["b.weight"].tobytes() == bits.tobytes()


def test_attributes_and_branches_survive(tmp_path):
    nodes = (
        Node("r", Reshape((2, 3)), ("x",)), Node("s", Softmax(1), ("r",)), Node("t", ReLU(), ("r",)),
    )  # fmt: skip
    net = Network({"x": TensorType(("B", 6), "bfloat16"), "unused": TensorType(("B",))}, nodes, ("s", "t", "s"), {})
    write_safetensors(net, tmp_path / "n.safetensors")
    assert_same(read_safetensors(tmp_path / "n.safetensors"), net)


def test_recipes_are_written_as_arrays_and_unused_weights_are_not(tmp_path):
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    recipe = Recipe.of(doubled, ("w",), (3, 2), flop=6)
    nodes = (Node("fc", Linear(), ("x",), {"weight": "w2"}),)
    net = Network({"x": TensorType(("B", 2))}, nodes, ("fc",), {"w": w, "w2": recipe})
    write_safetensors(net, tmp_path / "n.safetensors")
    back = read_safetensors(tmp_path / "n.safetensors")
    assert set(back.weights) == {"w2"}
    np.testing.assert_array_equal(back.weights["w2"], 2 * w)


def test_strided_and_big_endian_weights(tmp_path):
    w = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    net = sequential(TensorType(("B", 2)), [("fc", Linear())], {"fc.weight": w})
    write_safetensors(net, tmp_path / "n.safetensors")
    np.testing.assert_array_equal(read_safetensors(tmp_path / "n.safetensors").weights["fc.weight"], w)


def test_the_same_network_gives_the_same_bytes(tmp_path):
    for name in "ab":
        write_safetensors(mlp(3, 4, 2), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert int.from_bytes((tmp_path / "a").read_bytes()[:8], "little") % 8 == 0


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "n.safetensors"
    path.write_bytes(b"old")
    reserved = Network(
        {"x": TensorType(("B", 2))}, (Node("fc", Linear(), ("x",), {"weight": "__metadata__"}),), ("fc",),
        {"__metadata__": np.ones((3, 2), np.float32)},
    )  # fmt: skip
    with pytest.raises(InputError, match="__metadata__"):
        write_safetensors(reserved, path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(OutputError, match="mkdir"):
        write_safetensors(mlp(2, 2), tmp_path / "missing" / "n.safetensors")


# -- hostile files -----------------------------------------------------------------------------------------


TENSOR = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
HOSTILE = {
    "empty": (b"", "not a safetensors file"),
    "short": (b"1234", "4 B"),
    "header beyond the file": (container({})[:9], "ends inside its header"),
    "huge header": ((2**62).to_bytes(8, "little") + b"{}", f"{MAX_HEADER_BYTES:,}"),
    "no JSON": (container(b'{"a": 1,, }'), "at byte 16"),
    "no UTF-8": (container(b'{"\xff": 1}'), "a bad byte at 10"),
    "no object": (container([1]), "not a JSON object"),
    "deep": (container(b"[" * 100_000), "nested too deeply"),
    "long number": (container(b'{"w": ' + b"9" * 5000 + b"}"), "not usable JSON"),
    "twice": (container(b'{"w": 1, "w": 2}'), "'w' occurs twice"),
    "bare weights": (container({"w": TENSOR}, bytes(24)), "no graph"),
    "other metadata": (container({"__metadata__": {"format": "pt"}, "w": TENSOR}, bytes(24)), "no graph"),
    "metadata no string": (container({"__metadata__": {"onchip": 1}}), "not a string"),
    "tensor no object": (file_of(graph(), {"w": 3}), "not described by an object"),
    "dtype": (file_of(graph(), {"w": {**TENSOR, "dtype": "F99"}}), "unknown dtype"),
    "dtype list": (file_of(graph(), {"w": {**TENSOR, "dtype": []}}), "unknown dtype"),
    "shape": (file_of(graph(), {"w": {**TENSOR, "shape": [3, -2]}}), "bad shape"),
    "shape bool": (file_of(graph(), {"w": {**TENSOR, "shape": [3, True]}}), "bad shape"),
    "rank": (file_of(graph(), {"w": {**TENSOR, "shape": [1] * 65}}), "bad shape"),
    "overflow beside 0": (
        file_of(graph(), {"w": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b""), "bad shape",
    ),
    "offsets": (file_of(graph(), {"w": {**TENSOR, "data_offsets": [0]}}), "bad offsets"),
    "backwards": (file_of(graph(), {"w": {**TENSOR, "data_offsets": [24, 0]}}), "do not match"),
    "size": (file_of(graph(), {"w": {**TENSOR, "data_offsets": [0, 20]}}), "expected: 24 B"),
    "overlap": (file_of(graph(), {"w": TENSOR, "v": {**TENSOR, "data_offsets": [8, 32]}}, bytes(32)), "overlaps"),
    "same place": (file_of(graph(), {"w": TENSOR, "v": TENSOR}), "overlaps"),
    "gap": (file_of(graph(), {"w": {**TENSOR, "data_offsets": [8, 32]}}, bytes(32)), "gap"),
    "out of range": (file_of(graph(), {"w": TENSOR, "v": {**TENSOR, "data_offsets": [24, 48]}}), "truncated"),
    "truncated": (file_of(graph())[:-1], "truncated"),
    "trailing": (file_of(graph()) + b"x", "extra bytes"),
    "bool": (
        file_of(graph(), {"w": {"dtype": "BOOL", "shape": [3, 2], "data_offsets": [0, 6]}}, b"\1\0\2\0\0\0"), "above 1",
    ),
    "graph no JSON": (file_of("{"), "the graph is not JSON"),
    "graph a list": (file_of([]), "expected: an object"),
    "version": (file_of(graph(version=2)), "expected: version 1"),
    "version bool": (file_of(graph(version=True)), "version True"),
    "no version": (file_of({}), "version None"),
    "no nodes": (file_of({k: v for k, v in graph().items() if k != "nodes"}), "has no 'nodes'"),
    "name": (file_of(graph(name=3)), "'name' has the wrong type"),
    "half a letter": (file_of(graph(name="\ud800")), "not valid text"),
    "cast": (
        file_of(graph(nodes=node(kind="Cast", weights={}, attributes={"dtype": "int8"}))), "dtype has an invalid value",
    ),
    "kind": (file_of(graph(nodes=node(kind="Attention"))), "layer 'fc' has an unknown kind"),
    "abstract kind": (file_of(graph(nodes=node(kind="Layer"))), "unknown kind"),
    "unknown attribute": (file_of(graph(nodes=node(attributes={"slope": 1}))), "unknown attributes"),
    "attribute type": (
        file_of(graph(nodes=node(kind="Softmax", weights={}, attributes={"axis": "1"}))),
        "layer 'fc' (Softmax): axis has an invalid value",
    ),
    "attribute bool": (
        file_of(graph(nodes=node(kind="Softmax", weights={}, attributes={"axis": True}))), "expected: int",
    ),
    "attribute huge": (
        file_of(graph(nodes=node(kind="Softmax", weights={}, attributes={"axis": 10**99}))), "invalid value",
    ),
    "attribute floats": (
        file_of(graph(nodes=node(kind="Reshape", weights={}, attributes={"row_shape": [2.5]}))), "row_shape",
    ),
    "attribute no list": (
        file_of(graph(nodes=node(kind="Reshape", weights={}, attributes={"row_shape": 2}))), "tuple[int, ...]",
    ),
    "node no object": (file_of(graph(nodes=[3])), "a node has the wrong type"),
    "two nodes": (file_of(graph(nodes=node() + node())), "two values are called 'fc'"),
    "two inputs": (file_of(graph(inputs=graph()["inputs"] * 2)), "two inputs are called 'x'"),
    "input shape": (file_of(graph(inputs=[{"name": "x", "shape": ["B", 2.5], "dtype": "float32"}])), "bad shape"),
    "input axes": (file_of(graph(inputs=[{"name": "x", "shape": ["B"] + [1] * 64, "dtype": "float32"}])), "many axes"),
    "input dtype": (file_of(graph(inputs=[{"name": "x", "shape": ["B", 2], "dtype": "f"}])), "unknown dtype"),
    "missing weight": (file_of(graph(nodes=node(weights={"weight": "v"}))), "weight 'v' is not in the network"),
    "unknown value": (file_of(graph(nodes=node(inputs=["y"]))), "reads 'y'"),
    "unknown output": (file_of(graph(outputs=["y"])), "output 'y'"),
    "shapes": (file_of(graph(inputs=[{"name": "x", "shape": ["B", 5], "dtype": "float32"}])), "layer 'fc' (Linear)"),
    "graph key": (file_of(graph(output=["fc"])), "the graph has an unknown key"),
    "input key": (file_of(graph(inputs=[{**graph()["inputs"][0], "dtpye": "float16"}])), "did you mean dtype?"),
    "node key": (file_of(graph(nodes=node(weight={}))), "layer 'fc' has an unknown key"),
    "tensor key": (file_of(graph(), {"w": {**TENSOR, "scale": 2}}), "tensor 'w' has an unknown key"),
    "missing attribute": (file_of(graph(nodes=node(kind="Permute", weights={}))), "layer 'fc' (Permute) has no 'axes'"),
    "int32 weight": (
        file_of(graph(), {"w": {**TENSOR, "dtype": "I32"}}), "layer 'fc' (Linear): needs a floating-point weight",
    ),
    "uint8 weight": (
        file_of(graph(), {"w": {"dtype": "U8", "shape": [3, 2], "data_offsets": [0, 6]}}, bytes(6)), "uint8[3, 2]",
    ),
    "bool weight": (
        file_of(graph(), {"w": {"dtype": "BOOL", "shape": [3, 2], "data_offsets": [0, 6]}}, bytes(6)), "bool[3, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file(tmp_path, case):
    data, words = HOSTILE[case]
    with pytest.raises(FormatError) as caught:
        read_bytes(tmp_path, data)
    assert words in str(caught.value)
    assert "net.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_hand_made_file_itself_is_good(tmp_path):
    assert read_bytes(tmp_path, file_of(graph())).output == TensorType(("B", 3))


def test_attributes_may_be_omitted(tmp_path):
    net = read_bytes(tmp_path, file_of(graph(nodes=node(kind="Softmax", weights={}))))
    assert net.nodes[0].layer == Softmax(-1)


def test_weights_larger_than_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("onchip.files.free_memory", lambda: 48)  # twice the file's data
    assert read_bytes(tmp_path, file_of(graph())).parameters == 6
    monkeypatch.setattr("onchip.files.free_memory", lambda: 47)
    with pytest.raises(FormatError, match=r"net\.safetensors: .* memory"):
        read_bytes(tmp_path, file_of(graph()))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FormatError, match="cannot read"):
        read_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(FormatError, match="a folder"):
        read_safetensors(tmp_path)


@settings(SETTINGS, max_examples=300)
@given(cut=st.integers(0, 10**6), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=3))
def test_damage_is_an_error_or_a_network(tmp_path, cut, flips):
    path, good = tmp_path / "net.safetensors", tmp_path / "good.safetensors"
    if not good.exists():
        write_safetensors(mlp(3, 4, 2, output="Softmax"), good)
    data = bytearray(good.read_bytes())
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    path.write_bytes(data[: cut % (2 * len(data)) + 1])
    try:
        str(read_safetensors(path))
    except OnchipError as error:
        assert isinstance(error, FormatError)  # noqa: PT017


def test_later_layers_may_have_attributes_of_many_types(tmp_path):
    import dataclasses

    try:

        @dataclasses.dataclass(frozen=True)
        class Odd(Layer):
            scale: float = 1.0
            size: tuple[int, int] = (1, 1)
            pads: tuple[tuple[int, int], ...] = ()
            mode: str = "same"
            eps: float | None = None
            flip: bool = False

            def infer(self, inputs, weights):
                return inputs[0]

            def row_flop(self, inputs, weights):
                return 0

            def forward(self, xs, w):
                return xs[0]

        layer = Odd(scale=2.5, size=(3, 4), pads=((1, 2), (3, 4)), eps=1e-5, flip=True)
        net = Network({"x": TensorType(("B", 2))}, (Node("odd", layer, ("x",)),), ("odd",), {})
        path = tmp_path / "net.safetensors"
        write_safetensors(net, path)
        assert read_safetensors(path).nodes[0].layer == layer
        bad = json.loads(graph_to_json(net))
        for key, value in {"size": [1], "scale": "1", "eps": [], "flip": 1, "mode": None, "pads": [[1]]}.items():
            bad["nodes"][0]["attributes"] = {key: value}
            with pytest.raises(FormatError, match=f"{key} has an invalid value"):
                read_bytes(tmp_path, container({"__metadata__": {"onchip": json.dumps(bad)}}))
    finally:
        LAYERS.pop("Odd", None)
