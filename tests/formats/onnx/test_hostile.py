"""Damaged, hostile and unsupported ONNX files: each is a FormatError that says where and why."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onchip.errors import FormatError, OnchipError
from onchip.formats.onnx import reader as onnx_reader
from onchip.formats.onnx.ops.base import READERS
from onchip.formats.onnx.ops.norm_parts import NORM
from onchip.formats.onnx.reader import read_onnx
from onchip.formats.onnx.tensors import make_tensor
from onchip.formats.onnx.writer import write_onnx
from onnx_models import F32, SETTINGS, every_layer, image_layers, model, numbers, op, read, refused


def test_every_missing_operator_is_named_with_what_to_do_instead(tmp_path):
    nodes = [
        op("Det", "x", "a", name="first"),
        op("Det", "a", "b"),
        op("Range", "x x x", "c"),
        op("Compress", "b x", "d"),
    ]
    words = "Det (2 nodes, first 'first')", "Range of values (1 node)", "Compress (1 node)", "4 of 5 nodes"
    told = refused(
        tmp_path,
        model([*nodes, op("Relu", "d")]),
        "unsupported operators",
        *words,
        *(READERS.keys() - {NORM}),
    )
    assert "extract_model" in told
    assert "output size" in told
    assert "export" not in told
    refused(tmp_path, model([helper.make_node("Relu", ["x"], ["y"], domain="my.ops")]), "my.ops.Relu (1 node)")
    refused(tmp_path, model([helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")]), "before ONNX Runtime")


@pytest.mark.parametrize(
    ("kinds", "domain"),
    [
        (["DynamicQuantizeLinear", "MatMulInteger"], ""),
        (["ConvInteger"], ""),
        (["QLinearConv", "QLinearMatMul"], ""),
        (["QAttention", "DynamicQuantizeMatMul", "MatMulNBits", "QLinearAdd"], "com.microsoft"),
    ],
)
def test_an_int8_file_gets_hints(tmp_path, kinds, domain):
    nodes = [helper.make_node(kind, ["x"], [f"y{i}"], domain=domain) for i, kind in enumerate(kinds)]
    told = refused(tmp_path, model([*nodes, op("Relu", "y0")]), "float model", "QuantFormat.QDQ", *kinds)
    lines = told.splitlines()
    assert lines[-2].startswith("  try:")
    assert lines[-1].startswith("            or ")


def test_old_and_missing_opsets(tmp_path, monkeypatch):
    refused(tmp_path, model([op("Cast", "x", to="FLOAT")], opset=5), "too old", "opset 5", "opset 6 or newer", "Cast")
    refused(tmp_path, model([op("Det", "x")], opset=5), "Det (1 node)")
    proto = model([op("Relu", "x")])
    proto.opset_import[0].domain = "other"
    refused(tmp_path, proto, "no opset")
    monkeypatch.setattr(onnx_reader, "CONVERT", "import os; os.abort()")
    refused(tmp_path, model([op("Relu", "x")], opset=5), "too old", "it crashed")
    monkeypatch.setattr(onnx_reader, "CONVERT", "import time; time.sleep(60)")
    monkeypatch.setattr(onnx_reader, "CONVERT_SECONDS", 0.2)
    refused(tmp_path, model([op("Relu", "x")], opset=5), "not done after 0.2 s")


def test_unknown_and_several_opsets(tmp_path):
    for opset in (-1, 0, onnx.defs.onnx_opset_version() + 1, 100, 2**62):
        refused(tmp_path, model([op("Relu", "x")], opset=opset), "unknown opset", f"opset {opset}", "opset 1 to")
    for first, second in (("", ""), ("", "ai.onnx"), ("ai.onnx", "ai.onnx"), ("ai.onnx", "")):
        proto = model([op("Relu", "x")])
        proto.opset_import[0].domain = first
        proto.opset_import.append(helper.make_opsetid(second, 17))  # as skl2onnx writes it
        assert len(read(tmp_path, proto).nodes) == 1
        proto.opset_import[1].version = 13
        refused(tmp_path, proto, "several opsets", "opsets [13, 17]")
    proto = model([op("Relu", "x")])
    proto.opset_import.append(helper.make_opsetid("my.ops", 3))
    assert len(read(tmp_path, proto).nodes) == 1
    proto.ir_version = onnx.IR_VERSION + 1
    refused(tmp_path, proto, "too new", f"IR version {onnx.IR_VERSION + 1}")


UNKNOWN = {
    "typing error": (op("LeakyRelu", "x", name="act", alhpa=0.5), 17, "'alhpa'", "expected: alpha", "mean alpha?"),
    "none known": (op("Relu", "x", name="act", inplace=1), 17, "'inplace'", "expected: none"),
    "not yet": (op("MaxPool", "x", name="act", kernel_shape=[2], ceil_mode=1), 9, "'ceil_mode'", "opset 9"),
    "not any more": (op("ReduceMean", "x", name="act", axes=[2]), 18, "'axes'", "keepdims"),
    "of another operator": (op("Softmax", "x", name="act", alpha=0.5), 17, "'alpha'", "expected: axis"),
    "on constants": (op("Sqrt", "c", name="act", scale=2), 17, "'scale'"),
    "twice": (op("LeakyRelu", "x", name="act", alpha=0.5), 17, "repeated attribute"),
    "missing": (op("Concat", "x x", name="act"), 17, "missing attribute 'axis'"),
    "of a function": (op("LeakyRelu", "x", name="act", alpha=0.5), 17, "bad attribute 'alpha'"),
    "two values": (op("Constant", "", "k", "act", value_int=1, value_float=2.0), 17, "value_int", "one attribute"),
    "no such operator": (op("Gelu", "x", name="act"), 19, "no such operator", "opset 19"),
    "word": (op("Gelu", "x", name="act", approximate="quick"), 20, "bad attribute 'approximate'"),
    "input not yet": (op("Clip", "x c c", name="act"), 10, "wrong number of inputs", "at most 1"),
    "axes not yet": (op("ReduceMean", "x one", name="act"), 13, "wrong number of inputs"),
    "no axes": (op("Unsqueeze", "x", name="act"), 17, "no axes"),
    "no axes of a constant": (op("Unsqueeze", "c", name="act"), 17, "no axes"),
    "norm that trains": (op("BatchNormalization", "x c c c c", name="act"), 6, "training mode"),
    "dropout that trains": (op("Dropout", "x", name="act", ratio=0.5), 6, "training mode"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_ignored_attributes_and_inputs_are_refused(tmp_path, case):
    node, opset, *words = UNKNOWN[case]
    if case == "twice":
        node.attribute.append(helper.make_attribute("alpha", 0.1))
    if case == "of a function":
        node.attribute[0].ref_attr_name = "slope"
    proto = model([node], {"c": numbers(3), "one": np.array([2])}, ("N", 3, 4), opset)
    refused(tmp_path, proto, f"node 'act' ({node.op_type})", *words)


def test_layers_that_do_not_train_in_old_files(tmp_path):
    weights = {"c": abs(numbers(3))}
    nodes = [op("BatchNormalization", "x c c c c", "n", is_test=1), op("Dropout", "n", is_test=1)]
    net = read(tmp_path, model(nodes, weights, ("N", 3, 4), 6))
    assert [node.layer.kind for node in net.nodes] == ["BatchNorm1d", "Dropout"]


BAD_NODES = {
    "value matmul": ([op("MatMul", "x x")], "mix the rows of the batch"),
    "left constant": ([op("MatMul", "w x")], "mix the rows of the batch"),
    "vector": ([op("MatMul", "x b")], "input width and weight do not fit"),
    "cube": ([op("MatMul", "x cube")], "mix the rows of the batch"),
    "width": ([op("Gemm", "x w", transB=1)], "input width and weight do not fit"),
    "transA": ([op("Gemm", "x w", transA=1)], "transA"),
    "transB text": ([op("Gemm", "x w", transB="1")], "bad attribute 'transB'"),
    "bias a row": ([op("Gemm", "x w rows")], "not a bias"),
    "bias width": ([op("Gemm", "x w b4")], "not a bias"),
    "bias value": ([op("Gemm", "x w x")], "operands do not fit"),
    "dtypes": ([op("Gemm", "x w64")], "mixes dtypes"),
    "int weights": ([op("MatMul", "x wint")], "mixes dtypes"),
    "few inputs": ([op("Gemm", "x")], "input 1 must be a constant"),
    "no inputs": ([op("Relu", "")], "too few inputs"),
    "add constants": ([op("Add", "b b")], "output 'y' is missing or constant"),
    "add once": ([op("Add", "x")], "wrong number of inputs"),
    "add thrice": ([op("Mul", "x x x")], "wrong number of inputs"),
    "add rank": ([op("Add", "x b3")], "first size must be the batch"),
    "add rows": ([op("Add", "x rows")], "varies over the batch"),
    "sum of constants": ([op("Sum", "b b b")], "only constants"),
    "divide ints": ([op("Div", "x wint")], "mixes dtypes"),
    "add dtypes": ([op("Add", "x wint")], "mixes dtypes"),
    "concat constant": ([op("Concat", "x rows", axis=1)], "bad constant"),
    "concat axis": ([op("Concat", "x x", axis=2)], "axis out of range"),
    "concat batch": ([op("Concat", "x x", axis=-2)], "axis 0 is the batch"),
    "concat nothing": ([op("Concat", "", axis=1)], "too few inputs"),
    "cast to what": ([op("Cast", "x", to=99)], "ONNX type 99"),
    "transpose": ([op("Transpose", "x")], "puts the batch first again"),
    "transpose twice": ([op("Transpose", "x", perm=[0, 0])], "bad axes"),
    "transpose text": ([op("Transpose", "x", perm="01")], "bad attribute 'perm'"),
    "squeeze": ([op("Squeeze", "x ones")], "can only squeeze 1"),
    "squeeze the batch": ([op("Squeeze", "x zero")], "first size must be the batch"),
    "unsqueeze in front": ([op("Unsqueeze", "x zero")], "puts the batch first again"),
    "unsqueeze far": ([op("Unsqueeze", "x seven")], "bad axes"),
    "unsqueeze twice": ([op("Unsqueeze", "x twice")], "bad axes"),
    "reduce the batch": ([op("ReduceMax", "x", axes=[0])], "an axis of a row"),
    "reduce all": ([op("ReduceMean", "x")], "axis 0 is the batch"),
    "reduce far": ([op("ReduceMean", "x", axes=[2])], "axis out of range"),
    "reduce twice": ([op("ReduceMean", "x", axes=[1, -1])], "bad axes"),
    "reduce huge": ([op("ReduceMean", "x", axes=[2**62])], "bad attribute 'axes'"),
    "cumsum axes": ([op("CumSum", "x twice")], "bad axis"),
    "cumsum batch": ([op("CumSum", "x zero")], "axis 0 is the batch"),
    "cumsum by value": ([op("CumSum", "x x")], "must be a constant"),
    "look up values": ([op("Gather", "x zero")], "axis 0"),
    "look up floats": ([op("Gather", "w x")], "needs int ids"),
    "look up columns": ([op("Gather", "w x", axis=1)], "only rows"),
    "norm training": ([op("BatchNormalization", "x b4 b4 b4 b4", training_mode=1)], "training mode"),
    "norm spatial": ([op("BatchNormalization", "x b4 b4 b4 b4", spatial=0)], "spatial"),
    "norm sizes": ([op("BatchNormalization", "x b4 b4 b b4")], "do not fit"),
    "global": ([op("GlobalMaxPool", "x")], "needs batch and channels first"),
    "split rows": ([op("Split", "x")], "would mix the rows of the batch"),
    "split sizes": ([op("Split", "x ones", axis=1)], "bad sizes"),
    "slice rows": ([op("Slice", "x zero ones zero", name="s")], "would mix the rows of the batch"),
    "slice by values": ([op("Slice", "x x x")], "input 1 must be a constant"),
    "unknown value": ([op("Relu", "z")], "reads 'z'"),
    "order": ([op("Relu", "z"), op("Relu", "x", "z")], "reads 'z'"),
    "same output": ([op("Relu", "x"), op("Tanh", "x")], "missing or repeated"),
    "output is input": ([op("Relu", "x", "x")], "missing or repeated"),
    "output is weight": ([op("Relu", "x", "w")], "missing or repeated"),
    "unnamed output": ([op("Relu", "x", "")], "missing or repeated"),
    "no output": ([helper.make_node("Relu", ["x"], [])], "no output"),
    "missing output": ([op("Relu", "x", "z")], "output 'y'"),
    "constant output": ([op("Identity", "w")], "output 'y'"),
    "mask": ([helper.make_node("Dropout", ["x"], ["d", "mask"]), op("Relu", "mask")], "reads 'mask'"),
}


@pytest.mark.parametrize("case", BAD_NODES)
def test_bad_nodes(tmp_path, case):
    nodes, *words = BAD_NODES[case]
    weights = {
        "w": numbers(4, 3), "w1": numbers(4, 1), "w64": numbers(4, 3, dtype="float64"), "wint": np.ones((4, 3), "i4"),
        "ones": np.array([1]), "zero": np.array([0]), "seven": np.array([7]), "twice": np.array([1, 1]),
        "root": np.float32(2**0.5), "tiny": np.float32(1e-45),
        "b": numbers(3), "b4": numbers(4), "b3": numbers(1, 1, 3), "rows": numbers(5, 3), "cube": numbers(1, 4, 3),
    }  # fmt: skip
    refused(tmp_path, model(nodes, weights), *words)


def test_gemm_needs_two_axes(tmp_path):
    refused(tmp_path, model([op("Gemm", "x w")], {"w": numbers(4, 3)}, ("N", 2, 4)), "needs a matrix")


def test_rows_and_graphs_that_are_too_large(tmp_path):
    refused(tmp_path, model([op("Relu", "x")], x=("N", 2**40)), "input 'x'", "rows are too large")
    shape = {"s": np.array([0] + [1] * 64)}
    refused(tmp_path, model([op("Reshape", "x s")], shape, ("N", 1)), "bad shape operand")
    node = op("Relu", "x").SerializeToString()
    proto = model([])
    proto.graph.MergeFromString(b"".join(b"\x0a" + bytes([len(node)]) + node for _ in range(10**6)))
    assert len(proto.graph.node) == 10**6
    refused(tmp_path, proto, "graph is too large", "1,000,000 nodes")


def test_weights_larger_than_memory(tmp_path, monkeypatch):
    proto = model([op("MatMul", "x w")], {"w": numbers(4, 3)})
    monkeypatch.setattr(
        "onchip.formats.onnx.tensors.free_memory", lambda: 4 * 48
    )  # half of memory, as read and as used
    assert read(tmp_path, proto).parameters == 12
    monkeypatch.setattr("onchip.formats.onnx.tensors.free_memory", lambda: 4 * 48 - 1)
    refused(tmp_path, proto, "too many weights", "96 B", "at most 95 B")


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="no such endless file here")
def test_a_file_that_says_it_is_empty_and_never_ends(tmp_path):
    (tmp_path / "model.onnx").symlink_to("/proc/self/pagemap")
    with pytest.raises(FormatError, match="not an ONNX file"):
        read_onnx(tmp_path / "model.onnx")


def test_a_long_graph_is_read_quickly(tmp_path):
    count = 20_000
    nodes = [op("Relu", f"v{i}" if i else "x", f"v{i + 1}") for i in range(count)]
    assert len(read(tmp_path, model(nodes, outputs=(f"v{count}",))).nodes) == count
    nodes = [op("Gemm", "x w", f"v{i}", alpha=1 + i / count) for i in range(3000)]
    assert len(read(tmp_path, model(nodes, {"w": numbers(4, 3)}, outputs=("v2999",))).nodes) == 1


@pytest.mark.parametrize(("x", "words"), [
    (None, "no shape"), ((), "no batch"), (("N", "M"), "only the batch may be dynamic"),
    (("N", None), "only the batch may be dynamic"), (("N", -4), "only the batch may be dynamic"),
    (("N", *[1] * 64), "65 axes"),
])  # fmt: skip
def test_bad_inputs(tmp_path, x, words):
    refused(tmp_path, model([op("Relu", "x")], x=x), words, "input 'x'")


def test_more_bad_inputs(tmp_path):
    proto = model([op("Relu", "x")])
    proto.graph.input.append(helper.make_tensor_value_info("x", F32, ("N", 4)))
    refused(tmp_path, proto, "same name")
    proto = model([op("Relu", "x")], x=(2, 4))
    proto.graph.input.append(helper.make_tensor_value_info("z", F32, (3, 4)))
    refused(tmp_path, proto, "different numbers of rows", "[2, 3]")
    refused(tmp_path, model([op("Relu", "x")], element=TensorProto.STRING), "unsupported element type")
    refused(tmp_path, model([op("Relu", "x")], element=TensorProto.INT32), "floating-point")
    proto = model([op("Relu", "x")])
    del proto.graph.input[:]
    refused(tmp_path, proto, "reads 'x'")
    proto = model([op("Relu", "x")])
    del proto.graph.output[:]
    refused(tmp_path, proto, "no output")


def test_bad_tensors(tmp_path):
    def with_tensor(**changes):
        tensor = make_tensor("w", numbers(4, 3))
        for field, value in changes.items():
            tensor.ClearField(field)
            if isinstance(value, list):
                getattr(tensor, field).extend(value)
            elif value is not None:
                setattr(tensor, field, value)
        proto = model([op("MatMul", "x w")])
        proto.graph.initializer.append(tensor)
        return proto

    refused(tmp_path, with_tensor(raw_data=bytes(47)), "tensor 'w' is damaged", "47 B", "48 B")
    refused(tmp_path, with_tensor(raw_data=None), "0 elements", "12")
    refused(tmp_path, with_tensor(dims=[4, -3]), "negative size")
    refused(tmp_path, with_tensor(dims=[2**62, 2**62]), "too many weights")
    refused(tmp_path, with_tensor(dims=[0, 2**62, 2**62], raw_data=b""), "bad shape")
    refused(tmp_path, with_tensor(dims=[1] * 100, raw_data=bytes(4)), "bad shape")
    refused(tmp_path, with_tensor(data_type=TensorProto.STRING), "unsupported element type")
    refused(tmp_path, with_tensor(data_type=99), "ONNX type 99")
    refused(tmp_path, with_tensor(data_type=TensorProto.BOOL, raw_data=bytes([2] * 12)), "not bool")
    proto = with_tensor()
    proto.graph.initializer.append(proto.graph.initializer[0])
    refused(tmp_path, proto, "two initializers")
    proto = with_tensor()
    proto.graph.sparse_initializer.add()
    refused(tmp_path, proto, "sparse")


# -- external data -----------------------------------------------------------------------------------------


def external(location, offset="0", length=None):
    proto = model([op("MatMul", "x w")])
    tensor = proto.graph.initializer.add(name="w", data_type=F32, dims=(4, 3), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    return proto


def test_external_data(tmp_path):
    w = numbers(4, 3)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(bytes(8) + w.tobytes())
    for length in (None, "48"):
        np.testing.assert_array_equal(read(tmp_path, external("sub/w.bin", "8", length)).weights["w"], w.T)
    (tmp_path / "link.bin").symlink_to("sub/w.bin")  # a link inside the folder
    np.testing.assert_array_equal(read(tmp_path, external("link.bin", "8")).weights["w"], w.T)


def test_onnx_writes_external_data_that_is_read(tmp_path):
    proto = model([op("MatMul", "x w")], {"w": numbers(4, 3)})
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    np.testing.assert_array_equal(read_onnx(tmp_path / "m.onnx").weights["w"], numbers(4, 3).T)


def test_external_data_stays_in_the_folder(tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    for location in ("../secret.bin", str(secret), "link.bin", "up/secret.bin", "a/../../secret.bin", "..\\secret.bin",
                     "", "a\0b", "C:\\secret.bin", "../model/../secret.bin"):  # fmt: skip
        refused(folder, external(location), "outside the model's folder")
    for location in ("none.bin", ".", "loop", "x" * 300):
        with pytest.raises(FormatError, match=r"missing|outside"):
            read(folder, external(location))


def test_external_data_must_be_complete(tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(50))
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path, external("w.bin", "8"), "truncated", "50 B", "56 B")
    refused(tmp_path, external("w.bin", "0", "47"), "length", "48 B")
    for bad in ("-1", "x", "", "9" * 40, "1.5"):
        refused(tmp_path, external("w.bin", bad), "bad offset")
    refused(tmp_path, external("pipe"), "missing")


# -- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x08", bytes(100), b"\xff" * 100, b"PK\3\4" * 9])
def test_garbage(tmp_path, data):
    refused(tmp_path, data, "not an ONNX file")


def test_names_that_are_not_text(tmp_path):
    data = model([op("Relu", "x", name="NAME")]).SerializeToString()
    refused(tmp_path, data.replace(b"NAME", b"N\xff\xfeE"), "not UTF-8")


@pytest.mark.parametrize("layers", [every_layer, image_layers])
@settings(SETTINGS, max_examples=300)
@given(cut=st.integers(0, 10**6), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=3))
def test_damage_is_an_error_or_a_network(tmp_path, layers, cut, flips):
    good = tmp_path / "good.onnx"
    if not good.exists():
        write_onnx(layers(), good)
    data = bytearray(good.read_bytes())
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    is_read(tmp_path, bytes(data[: cut % (2 * len(data)) + 1]))


ODD = st.sampled_from([0, 1, -1, 2, 7, 64, 2**31 - 1, 2**31, 2**62, -(2**63), 2**63 - 1])


@settings(SETTINGS, max_examples=300)
@given(data=st.data())
def test_odd_attributes_and_wires_are_an_error_or_a_network(tmp_path, data):
    good = tmp_path / "good.onnx"
    if not good.exists():
        write_onnx(image_layers(), good)
    proto = onnx.load(good)
    names = [value for node in proto.graph.node for value in (*node.input, *node.output)]
    for _ in range(data.draw(st.integers(1, 3))):
        node = data.draw(st.sampled_from(list(proto.graph.node)))
        if node.attribute and data.draw(st.booleans()):
            attribute = data.draw(st.sampled_from(list(node.attribute)))
            attribute.i = data.draw(ODD)
            attribute.ints[:] = data.draw(st.lists(ODD, max_size=5))
        else:
            node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(st.sampled_from(names))
    is_read(tmp_path, proto)


def is_read(tmp_path, proto):
    try:
        str(read(tmp_path, proto))
    except OnchipError as error:
        assert isinstance(error, FormatError)  # noqa: PT017
