"""sentiment: the file's order, and the network against sums written out."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from onchip.errors import FormatError, InputError, ShapeError
from onchip.kernels import reference
from onchip.network.recipe import Recipe, materialise
from onchip.workloads import load, sentiment

SIZES = {"vocabulary": 11, "embedding": 5, "channels": 3, "kernels": (1, 3, 4), "length": 6, "hidden": (7, 4)}
NAMES = ["emb.weight", "conv1.weight", "conv1.bias", "conv3.weight", "conv3.bias", "conv4.weight", "conv4.bias",
         "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"]  # fmt: skip
SHAPES = [(11, 5), (3, 5, 1), (3,), (3, 5, 3), (3,), (3, 5, 4), (3,), (7, 9), (7,), (4, 7), (4,), (2, 4), (2,)]


def random_file(path):
    """params.bin for SIZES, and its tensors."""
    rng = np.random.default_rng(5)
    tensors = {name: rng.standard_normal(shape).astype("<f4") for name, shape in zip(NAMES, SHAPES, strict=True)}
    path.write_bytes(b"".join(tensor.tobytes() for tensor in tensors.values()))
    return tensors


def by_hand(w, ids, lengths=None):
    """The network in float64, every sum a loop."""
    w = {name: tensor.astype(np.float64) for name, tensor in w.items()}
    answers = []
    for row, length in zip(ids, [6] * len(ids) if lengths is None else lengths, strict=True):
        found = []
        for K in (1, 3, 4):
            for o in range(3):
                sums = []
                for p in range(length - K + 1):
                    total = w[f"conv{K}.bias"][o]
                    for k in range(K):
                        for c in range(5):
                            total += w[f"conv{K}.weight"][o, c, k] * w["emb.weight"][row[p + k], c]
                    sums.append(max(total, 0.0))
                found.append(max(sums, default=0.0))
        for i in (1, 2, 3):
            found = [sum(a * b for a, b in zip(line, found, strict=True)) for line in w[f"fc{i}.weight"]]
            found = [a + b for a, b in zip(found, w[f"fc{i}.bias"], strict=True)]
            if i < 3:
                found = [max(a, 0.0) for a in found]
        answers.append(found)
    return np.array(answers)


def test_the_network_is_what_the_report_says(tmp_path):
    tensors = random_file(tmp_path / "params.bin")
    net = sentiment.network(tmp_path / "params.bin", **SIZES)
    ids = np.random.default_rng(6).integers(0, 11, (13, 6), dtype=np.int32)
    ids[0, 0], ids[1, -1] = 0, 10  # the first and the last token of the table
    assert np.allclose(reference.forward(net, ids), by_hand(tensors, ids), rtol=1e-12, atol=1e-12)


def test_sentences_of_different_lengths(tmp_path):
    tensors = random_file(tmp_path / "params.bin")
    net = sentiment.network(tmp_path / "params.bin", lengths=True, **SIZES)
    ids = np.random.default_rng(6).integers(0, 11, (14, 6), dtype=np.int32)
    lengths = (np.arange(14) % 7).astype(np.int32)
    want = by_hand(tensors, ids, lengths)
    assert np.allclose(reference.forward(net, (ids, lengths)), want, rtol=1e-12, atol=1e-12)
    for engine in (onchip.compile(net, "cpu", batch_hint=10**9), onchip.compile(net, "cpu", without=("fold",))):
        assert np.allclose(engine(ids, lengths), want, rtol=1e-4, atol=1e-5)
        behind = np.where(np.arange(6) < lengths[:, None], ids, 0)
        assert np.array_equal(engine(behind, lengths), engine(ids, lengths))  # ids after the end have no effect


def test_a_padding_id_whose_row_is_zero():
    """As in TextCNNs: windows of padding only have the bias, as with zeros after the sentence."""
    net = sentiment.network(**SIZES)
    weights = {name: materialise(name, net.weights).copy() for name in net.weights}
    weights["emb.weight"][0] = 0
    net = net.replace(weights=weights)
    ids = np.random.default_rng(6).integers(1, 11, (5, 6), dtype=np.int32)
    ids[:, 4:] = 0
    engine = onchip.compile(net, "cpu", batch_hint=10**9)
    assert "token_max" in str(engine.plan)
    assert np.allclose(engine(ids), by_hand(weights, ids), rtol=1e-4, atol=1e-5)


def test_a_file_is_mapped_not_copied(tmp_path):
    tensors = random_file(tmp_path / "params.bin")
    net = sentiment.network(tmp_path / "params.bin", **SIZES)
    assert list(net.weights) == NAMES
    for name, weight in net.weights.items():
        assert np.array_equal(weight, tensors[name])
        assert not weight.flags.owndata
        assert weight.flags.c_contiguous


def test_another_size_is_named(tmp_path):
    random_file(tmp_path / "params.bin")
    whole = (tmp_path / "params.bin").read_bytes()
    (tmp_path / "params.bin").write_bytes(whole[:-9])
    with pytest.raises(FormatError, match=r"ends inside 'fc3\.weight'"):
        sentiment.network(tmp_path / "params.bin", **SIZES)
    (tmp_path / "params.bin").write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match=r"extra bytes after 'fc3\.bias'"):
        sentiment.network(tmp_path / "params.bin", **SIZES)


def test_the_full_size_draws_nothing():
    net = load("sentiment")
    assert all(isinstance(weight, Recipe) for weight in net.weights.values())
    assert net.parameters == 200_299_010
    assert str(net.input) == "int32[B, 16]"
    assert str(net.output) == "float32[B, 2]"
    assert [w.shape for w in net.weights.values()] == [
        (21635, 4096),
        *((1024, 4096, 3), (1024,), (1024, 4096, 5), (1024,), (1024, 4096, 7), (1024,), (1024, 4096, 9), (1024,)),
        *((2048, 4096), (2048,), (1024, 2048), (1024,), (512, 1024), (512,), (2, 512), (2,)),
    ]


def test_seeded_weights_keep_values_of_order_one():
    sizes = {**SIZES, "embedding": 64, "channels": 32, "hidden": (64, 32), "vocabulary": 100}
    ids = np.random.default_rng(7).integers(0, 100, (50, 6), dtype=np.int32)
    y = reference.forward(sentiment.network(seed=1, **sizes), ids)
    assert 0.1 < y.std() < 10
    assert np.array_equal(y, reference.forward(sentiment.network(seed=1, **sizes), ids))
    assert not np.array_equal(y, reference.forward(sentiment.network(seed=2, **sizes), ids))
    net = sentiment.network(seed=1, **sizes)
    normal = np.random.default_rng([1, 3]).standard_normal((32, 64, 3), dtype=np.float32)
    expected = np.float32(0) + np.float32(np.sqrt(2 / (64 * 3))) * normal  # tensor number 3 of the file
    assert np.array_equal(materialise("conv3.weight", net.weights), expected)


def test_sizes_that_do_not_fit():
    with pytest.raises(ShapeError, match="conv4"):
        sentiment.network(**{**SIZES, "length": 3})


# -- odd shapes, on every device -------------------------------------------------------------------------------

ODD = {
    "one token": {"length": 1, "kernels": (1,)},
    "as long as the sentence": {"length": 5, "kernels": (5,)},
    "some as long as the sentence": {"length": 9, "kernels": (1, 9, 4)},
    "one channel": {"channels": 1},
    "one channel in all": {"channels": 1, "kernels": (3,), "hidden": ()},
    "vocabulary 1": {"vocabulary": 1},
    "one of everything": {
        "vocabulary": 1, "embedding": 1, "channels": 1, "kernels": (1,), "length": 1, "hidden": (1,), "classes": 1,
    },
    "as in the report": {"vocabulary": 50, "channels": 64, "kernels": (3, 5, 7, 9), "length": 16, "hidden": (40,)},
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def odd_network(name, lengths):
    net = sentiment.network(**{**SIZES, **ODD[name]}, lengths=lengths)
    return net.replace(weights={name: materialise(name, net.weights) for name in net.weights})


def odd_rows(net, B):
    rng = np.random.default_rng(B)
    ids = rng.integers(0, net.weights["emb.weight"].shape[0], (B, *net.inputs["ids"].row_shape), dtype=np.int32)
    return (ids, rng.integers(0, ids.shape[1] + 2, B).astype(np.int32)) if "lengths" in net.inputs else (ids,)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("without", [(), ("fold",)])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("device", DEVICES)
def test_odd_shapes(device, name, without, lengths):
    net = odd_network(name, lengths)
    engine, given = onchip.compile(net, device, batch_hint=10**9, without=without), odd_rows(net, 4_097)
    got, few = engine(*given), tuple(x[:50] for x in given)
    assert_error_within(got[:50], reference.forward(net, few), baseline=reference.forward(net, few, "float32"))
    for B in (0, 1, 7):
        assert engine(*(x[:B] for x in given)).tobytes() == got[:B].tobytes()
        assert engine(*(x[99 : 99 + B] for x in given)).tobytes() == got[99 : 99 + B].tobytes()


@pytest.mark.parametrize("without", [(), ("fold",)])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_id_is_named(device, name, without):
    net = odd_network(name, False)
    V, (good,) = net.weights["emb.weight"].shape[0], odd_rows(net, 30)
    engine, bad = onchip.compile(net, device, batch_hint=10**9, without=without), good.copy()
    bad[[29, 17], -1] = -1, V
    for _ in range(2):
        with pytest.raises(InputError, match=f"row 17, position {good.shape[1] - 1}: id {V}, expected 0 to {V - 1}"):
            engine(bad)
        assert np.isfinite(engine(good)).all()
