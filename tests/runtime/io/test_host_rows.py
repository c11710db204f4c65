"""Engines accept rows in many forms, by position or by name, and convert dtypes where values fit."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from checks import random_mlp, rows
from gpu_networks import two_towers
from onchip import cache
from onchip.errors import InputError, ShapeError
from onchip.network.graph import Network, Node
from onchip.network.layers import Identity, ReLU
from onchip.network.meaning import Meaning
from onchip.network.types import TensorType
from onchip.runtime.engine import compile


@functools.cache
def engine_of(dtype: str, *row: int):
    """y = x."""
    net = Network({"x": TensorType(("B", *row), dtype)}, (Node("y", Identity(), ("x",)),), ("y",), {})
    return compile(net, device="cpu")


@functools.cache
def mlp():
    return compile(random_mlp(3, 4, 2), device="cpu")


@functools.cache
def towers():
    return compile(two_towers(), device="cpu")


def tower_inputs(B=5):
    return np.random.default_rng(B).integers(0, 9, (B, 1)), rows(B, 6)


# -- forms -----------------------------------------------------------------------------------------------------


def test_nested_lists():
    x = rows(5, 3).round(2)
    given = x.astype(np.float64).round(2).tolist()
    for form in (given, tuple(map(tuple, given)), list(x)):
        got = mlp()(form)
        assert type(got) is np.ndarray
        assert np.array_equal(got, mlp()(np.asarray(given, np.float32)))
    assert np.array_equal(engine_of("int64", 2)([[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    for odd, words in (([[1.0, 2.0, 3.0], [1.0]], "is not an array"), ([1.0, 2.0, 3.0], "wrong shape")):
        with pytest.raises(ShapeError, match=words):
            mlp()(odd)
    with pytest.raises(ShapeError, match="input 'x' has the wrong dtype"):
        mlp()([["a", "b", "c"]])


def test_what_is_no_form_of_rows_is_named():
    for odd in ({1.0}, 3, None, "rows.npy"):
        with pytest.raises(ShapeError, match=rf"input 'x' is not an array[\s\S]*{type(odd).__name__}"):
            mlp()(odd)


def test_data_frames_by_the_order_of_their_columns():
    pandas = pytest.importorskip("pandas")
    x = rows(4, 3)
    frame = pandas.DataFrame(x.astype(np.float64), columns=["c", "a", "b"])
    assert np.array_equal(mlp()(frame), mlp()(x))
    mixed = pandas.DataFrame({"a": [1, 2], "b": [0.5, np.nan], "c": [True, False]})
    assert np.array_equal(mlp()(mixed), mlp()(np.array([[1, 0.5, 1], [2, np.nan, 0]], np.float32)), equal_nan=True)
    whole = pandas.DataFrame({"a": [1, 2], "b": pandas.array([3, 4], "Int64")})
    assert np.array_equal(engine_of("int64", 2)(whole), [[1, 3], [2, 4]])
    assert np.array_equal(engine_of("int64")(whole["a"]), [1, 2])


@pytest.mark.parametrize("odd", [["u", "v"], ["", 1.0], [None, 1.0], ["2020-01-01", "2020-01-02"]])
def test_a_column_without_numbers_is_named(odd):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "town": pandas.Series(odd, dtype=object), "b": [1, 2]})
    if "2020" in str(odd[0]):
        frame["town"] = pandas.to_datetime(frame["town"])
    with pytest.raises(InputError, match="column 'town' of input 'x' is not numeric"):
        mlp()(frame)
    with pytest.raises(InputError, match="column 'town' of input 'x' is not numeric"):
        engine_of("float32")(frame["town"])
    assert mlp()(frame.assign(town=1)).shape == (2, 2)


def test_a_network_that_knows_its_columns_finds_them():
    pandas = pytest.importorskip("pandas")
    engine = compile(random_mlp(3, 4, 2).replace(meaning=Meaning(("a", "b", "c"))), device="cpu")
    x = rows(4, 3)
    frame = pandas.DataFrame(x, columns=["a", "b", "c"])
    frame["label"] = "red"
    assert np.array_equal(engine(frame[["label", "c", "a", "b"]]), engine(x))
    assert np.array_equal(engine(frame[["a", "b", "c"]].set_axis(["u", "v", "w"], axis=1)), engine(x))


# -- torch -----------------------------------------------------------------------------------------------------


def test_cpu_tensors_give_cpu_tensors_without_a_copy():
    torch = pytest.importorskip("torch")
    x = rows(4, 3)
    tensor = torch.from_numpy(x)
    got = mlp()(tensor)
    assert (type(got), got.dtype, got.requires_grad) == (torch.Tensor, torch.float32, False)
    assert np.array_equal(got.numpy(), mlp()(x))
    for same in (tensor.clone().requires_grad_(), torch.nn.Parameter(tensor), torch.from_numpy(x.T.copy()).T):
        assert torch.equal(mlp()(same), got)
    out = torch.empty(4, 2)
    assert mlp()(tensor, out=out) is out
    assert torch.equal(out, got)
    assert torch.equal(mlp()(tensor.double()), mlp()(tensor))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "bool", "int64"])
def test_tensors_of_every_dtype(dtype):
    torch = pytest.importorskip("torch")
    x = torch.tensor([[0, 1], [1, 1], [1, 0]]).to(getattr(torch, dtype))
    for given in (x, x.T.contiguous().T):
        got = engine_of(dtype, 2)(given)
        assert got.dtype == x.dtype
        assert got.tolist() == x.tolist()
    assert engine_of("float32", 2)(x).tolist() == [[0, 1], [1, 1], [1, 0]]


def test_several_tensors_and_what_is_mixed():
    torch = pytest.importorskip("torch")
    ids, x = tower_inputs()
    want = towers()(ids, x)
    for given in ((torch.from_numpy(ids), torch.from_numpy(x)), (ids, torch.from_numpy(x)), (torch.tensor(ids), x)):
        got = towers()(*given)
        assert all(torch.equal(y, torch.from_numpy(other)) for y, other in zip(got, want, strict=True))
    out = (torch.empty(5, 4), torch.empty(5, 4))
    assert towers()(torch.from_numpy(ids), x, out=out) is out
    assert torch.equal(out[1], torch.from_numpy(want[1]))
    tensors, arrays = torch.empty(4, 2), np.empty((4, 2), np.float32)
    for given, other, kind in ((rows(4, 3), tensors, "NumPy"), (torch.zeros(4, 3), arrays, "torch tensors")):
        with pytest.raises(InputError, match=rf"arrays of different kinds[\s\S]*expected: {kind}"):
            mlp()(given, out=other)
    for bad in (torch.empty(4, 3), torch.empty(2, 4).T, torch.empty(4, 2, dtype=torch.float64)):
        with pytest.raises(ShapeError, match=r"out (has the wrong|is not row-major)"):
            mlp()(torch.zeros(4, 3), out=bad)
    shared = torch.zeros(4, 3)
    with pytest.raises(ShapeError, match="out overlaps"):
        mlp()(shared, out=shared.view(-1)[:8].view(4, 2))


def test_tensors_that_are_not_plain():
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="input 'x' is not a dense tensor"):
        mlp()(torch.eye(3).to_sparse())
    with pytest.raises(InputError, match=r"input 'x' is not on the host[\s\S]*meta"):
        mlp()(torch.zeros(2, 3, device="meta"))


# -- dtypes ----------------------------------------------------------------------------------------------------

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTS = ("int64", "int32", "int16", "int8", "uint8", "bool")


@pytest.mark.parametrize("wanted", [*FLOATS, *INTS])
@pytest.mark.parametrize("given", [*FLOATS, *INTS, "uint64", "uint16", ">f8", ">i4", "longdouble"])
def test_dtypes_are_converted_where_they_hold_the_values(given, wanted):
    x = np.array([[0, 1], [1, 0], [1, 1]]).astype(ml_dtypes.bfloat16 if given == "bfloat16" else given)
    engine = engine_of(wanted, 2)
    is_float = [name in (*FLOATS, ">f8", "longdouble") for name in (given, wanted)]
    if is_float == [True, False]:
        with pytest.raises(ShapeError, match=rf"input 'x'[\s\S]*expected: {wanted}"):
            engine(x)
    else:
        got = engine(x)
        assert got.dtype.name == wanted
        assert got.tolist() == [[0, 1], [1, 0], [1, 1]]
        assert np.array_equal(engine(np.asfortranarray(x)), got)


@pytest.mark.parametrize(
    ("value", "given", "wanted"),
    [
        (1e39, "float64", "float32"), (-1e39, "float64", "float32"), (70_000, "int32", "float16"),
        (1e6, "float32", "float16"), (1 << 31, "int64", "int32"), (-(1 << 31) - 1, "int64", "int32"),
        (1 << 63, "uint64", "int64"), (128, "uint8", "int8"),
        ((1 << 64) - 1, "uint64", "int8"), (-1, "int8", "uint8"), (256, "int16", "uint8"), (2, "uint8", "bool"),
        (-1, "int64", "bool"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named(value, given, wanted):
    x = np.zeros((4, 3), given)
    x[2, 1] = value
    with pytest.raises(InputError, match=rf"row 2, position 1 .* {wanted}"):
        engine_of(wanted, 3)(x)
    with pytest.raises(InputError, match="row 2 of input 'x' is out of range"):
        engine_of(wanted)(x[:, 1].copy())


def test_infinities_and_nans_pass_and_the_ends_of_a_dtype_fit():
    x = np.array([[np.inf, -np.inf, np.nan]])
    assert np.array_equal(engine_of("float32", 3)(x), x.astype(np.float32), equal_nan=True)
    ends = np.array([[-(1 << 31), (1 << 31) - 1, 0]])
    assert np.array_equal(engine_of("int32", 3)(ends), ends)
    assert engine_of("int32", 3)(ends[:0]).shape == (0, 3)


def test_what_no_dtype_of_a_network_holds():
    for odd in (np.zeros((2, 3), complex), np.zeros((2, 3), "U1"), np.zeros((2, 3), "M8[s]"), np.zeros((2, 3), object)):
        with pytest.raises(ShapeError, match="input 'x' has the wrong dtype"):
            mlp()(odd)


def test_a_conversion_is_reported_once(capsys, monkeypatch):
    monkeypatch.setattr(cache, "printed", set())
    monkeypatch.setenv("ONCHIP_QUIET", "0")
    x = rows(4, 3)
    for _ in range(3):
        mlp()(x.astype(np.float64))
        mlp()(x)
        mlp()(x.tolist())
    lines = [line for line in capsys.readouterr().err.splitlines() if "converted" in line]
    assert lines == ["engine of mlp: input 'x' is converted from float64 to float32 in every call"]


def test_bytes_are_divided_as_when_the_network_was_trained(capsys, monkeypatch):
    monkeypatch.setattr(cache, "printed", set())
    monkeypatch.setenv("ONCHIP_QUIET", "0")
    engine = compile(random_mlp(3, 4, 2).replace(meaning=Meaning(scale=255.0)), device="cpu")
    x = np.array([[0, 128, 255]], np.uint8)
    assert np.array_equal(engine(x), engine(x.astype(np.float32) / np.float32(255)))
    assert "divided by 255" in capsys.readouterr().err


# -- names -----------------------------------------------------------------------------------------------------


def test_inputs_by_name():
    ids, x = tower_inputs()
    first, second = towers().plan.network.inputs
    want = towers()(ids, x)
    out = (np.empty((5, 4), np.float32), np.empty((5, 4), np.float32))
    for got in (
        towers()(**{first: ids, second: x}), towers()(**{second: x, first: ids}), towers()(ids, **{second: x}),
        towers()(out=out, **{second: x.tolist(), first: ids.astype(np.int32)}),
    ):  # fmt: skip
        assert all(np.array_equal(y, other) for y, other in zip(got, want, strict=True))
    odd = Network({"a b/é": TensorType(("B", 3))}, (Node("r", ReLU(), ("a b/é",)),), ("r",), {})
    assert compile(odd, device="cpu")(**{"a b/é": [[1, -1, 0]]}).tolist() == [[1, 0, 0]]
    own = Network({"self": TensorType(("B", 3))}, (Node("r", ReLU(), ("self",)),), ("r",), {})
    assert compile(own, device="cpu")(self=rows(2, 3)).shape == (2, 3)


def test_names_that_are_unknown_missing_or_given_twice():
    ids, x = tower_inputs()
    first, second = towers().plan.network.inputs
    with pytest.raises(InputError, match=rf"got: *{first}s\n[\s\S]*did you mean {first}"):
        towers()(**{f"{first}s": ids, second: x})
    with pytest.raises(InputError, match=rf"engine\({first}=\.\.\., {second}=\.\.\.\)"):
        towers()(ids, zzz=x)
    with pytest.raises(InputError, match=rf"'{second}'\n.*got: *{first}\n[\s\S]*{second}=\.\.\."):
        towers()(**{first: ids})
    with pytest.raises(InputError, match=rf"'{first}'\n.*argument 0 and {first}="):
        towers()(ids, **{first: ids, second: x})
    with pytest.raises(InputError, match="wrong number of inputs"):
        towers()(ids, x, x)
    with pytest.raises(InputError, match="two values of the input"):
        towers()(ids, x, x, **{second: x})
