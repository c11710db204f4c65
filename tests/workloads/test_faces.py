"""faces: the file's order, and the network against the report's own index formulas written as loops."""

import numpy as np
import pytest

from onchip.errors import FormatError, InputError
from onchip.kernels import reference
from onchip.network.recipe import Recipe, materialise
from onchip.workloads import faces, load

LATENT, CHANNELS, START = 5, (4, 3, 2, 3), 2  # 2x2x4 -> 4x4x3 -> 8x8x2 -> 16x16x3
SIZES = {"latent": LATENT, "channels": CHANNELS, "start": START}


def random_file(path):
    """network.bin for SIZES and its tensors, in the order and the layouts of the report."""
    rng = np.random.default_rng(3)
    tensors = {}

    def put(name, *shape):
        tensors[name] = rng.standard_normal(shape).astype("<f4")

    def put_norm(i, C):
        for part in ("beta", "gamma", "mean"):
            put(f"bn{i}_{part}", C)
        tensors[f"bn{i}_var"] = rng.uniform(0.1, 2, C).astype("<f4")

    put("proj_w", LATENT, START * START * CHANNELS[0])
    put("proj_b", START * START * CHANNELS[0])
    put_norm(0, CHANNELS[0])
    for i in range(1, len(CHANNELS)):
        put(f"tconv{i}_w", 5, 5, CHANNELS[i], CHANNELS[i - 1])
        put(f"tconv{i}_b", CHANNELS[i])
        if i < len(CHANNELS) - 1:
            put_norm(i, CHANNELS[i])
    path.write_bytes(b"".join(tensor.tobytes() for tensor in tensors.values()))
    return tensors


def by_stretched_input(x, w, b):
    """x (H, W, C), w (5, 5, K, C): O[h, w, k] = sum of J[h + r, w + s, c] * W[4 - r, 4 - s, k, c], + b[k].

    J is x with 3 zeros at its left and top, 2 at its right and bottom, and a zero between any two numbers.
    """
    H, W, C = x.shape
    J = np.zeros((3 + 2 * H - 1 + 2, 3 + 2 * W - 1 + 2, C))
    for h in range(H):
        for v in range(W):
            J[3 + 2 * h, 3 + 2 * v] = x[h, v]
    out = np.zeros((2 * H, 2 * W, len(b)))
    for h in range(2 * H):
        for v in range(2 * W):
            for k in range(len(b)):
                out[h, v, k] = b[k]
                for r in range(5):
                    for s in range(5):
                        for c in range(C):
                            out[h, v, k] += J[h + r, v + s, c] * w[4 - r, 4 - s, k, c]
    return out


def by_even_places(x, w, b):
    """The same with h_in = h_out - 3 + r, of which only the even ones have a value: x[h_in / 2]."""
    H, W, C = x.shape
    out = np.zeros((2 * H, 2 * W, len(b)))
    for h_out in range(2 * H):
        for w_out in range(2 * W):
            for k in range(len(b)):
                out[h_out, w_out, k] = b[k]
                for r in range(5):
                    for s in range(5):
                        h_in, w_in = h_out - 3 + r, w_out - 3 + s
                        if h_in % 2 == 0 and w_in % 2 == 0 and 0 <= h_in // 2 < H and 0 <= w_in // 2 < W:
                            for c in range(C):
                                out[h_out, w_out, k] += x[h_in // 2, w_in // 2, c] * w[4 - r, 4 - s, k, c]
    return out


def by_scattering(x, w, b):
    """The same as a scatter: y[2i - 1 + r] += x[i] * w[r], r the stored index."""
    H, W, C = x.shape
    out = np.zeros((2 * H, 2 * W, len(b)))
    for i in range(H):
        for j in range(W):
            for r in range(5):
                for s in range(5):
                    if 0 <= 2 * i - 1 + r < 2 * H and 0 <= 2 * j - 1 + s < 2 * W:
                        for k in range(len(b)):
                            for c in range(C):
                                out[2 * i - 1 + r, 2 * j - 1 + s, k] += x[i, j, c] * w[r, s, k, c]
    return out + b


def by_hand(w, z, tconv):
    """The network in float64, NHWC as in the report."""
    w = {name: tensor.astype(np.float64) for name, tensor in w.items()}

    def norm_relu(x, i):
        scaled = (x - w[f"bn{i}_mean"]) / np.sqrt(w[f"bn{i}_var"] + 1e-5)
        return np.maximum(scaled * w[f"bn{i}_gamma"] + w[f"bn{i}_beta"], 0)

    pictures = []
    for row in z.astype(np.float64):
        x = (row @ w["proj_w"] + w["proj_b"]).reshape(START, START, CHANNELS[0])
        x = norm_relu(x, 0)
        for i in range(1, len(CHANNELS)):
            x = tconv(x, w[f"tconv{i}_w"], w[f"tconv{i}_b"])
            x = norm_relu(x, i) if i < len(CHANNELS) - 1 else np.tanh(x)
        pictures.append(x)
    return np.array(pictures)


@pytest.mark.parametrize("tconv", [by_stretched_input, by_even_places, by_scattering])
def test_the_network_is_what_the_report_says(tmp_path, tconv):
    tensors = random_file(tmp_path / "network.bin")
    net = faces.network(tmp_path / "network.bin", **SIZES)
    z = np.random.default_rng(4).standard_normal((3, LATENT)).astype(np.float32) / 4
    truth = by_hand(tensors, z, tconv)
    assert truth.shape == (3, 16, 16, 3)
    assert np.abs(truth).mean() < 0.99  # tanh is not saturated everywhere
    assert np.allclose(reference.forward(net, z), truth, rtol=1e-10, atol=1e-12)


def test_pixels_are_bytes(tmp_path):
    random_file(tmp_path / "network.bin")
    z = np.random.default_rng(4).standard_normal((3, LATENT)).astype(np.float32) / 4
    floats = reference.forward(faces.network(tmp_path / "network.bin", **SIZES), z)
    net = faces.network(tmp_path / "network.bin", pixels=True, **SIZES)
    assert str(net.output) == "uint8[B, 16, 16, 3]"
    expected = np.array([int((x + 1) / 2 * 255) for x in floats.ravel()]).reshape(floats.shape)
    assert np.array_equal(reference.forward(net, z), expected)


def test_another_size_is_named(tmp_path):
    random_file(tmp_path / "network.bin")
    whole = (tmp_path / "network.bin").read_bytes()
    (tmp_path / "network.bin").write_bytes(whole[: (5 * 16 + 16 + 4) * 4])
    with pytest.raises(FormatError, match=r"ends inside 'bn0\.weight'"):
        faces.network(tmp_path / "network.bin", **SIZES)
    with pytest.raises(FormatError, match="20,549,132 B: 5,137,283 float32"):
        faces.network(tmp_path / "network.bin")


def test_the_full_size_draws_nothing():
    net = load("faces")
    assert all(isinstance(weight, Recipe) for weight in net.weights.values())
    assert net.parameters == 5_137_283
    assert str(net.input) == "float32[B, 100]"
    assert str(net.output) == "float32[B, 64, 64, 3]"


def test_seeded_weights_stand_in_the_order_of_the_file(tmp_path):
    """The seeded weights, written to a file in this layout, give the same network."""
    drawn = faces.draw_flat(faces.layout(LATENT, CHANNELS, START), seed=7)
    data = b"".join(materialise(name, drawn).astype("<f4").tobytes() for name in drawn)
    (tmp_path / "network.bin").write_bytes(data)
    z = np.random.default_rng(8).standard_normal((20, LATENT)).astype(np.float32)
    y = reference.forward(faces.network(seed=7, **SIZES), z)
    assert np.array_equal(y, reference.forward(faces.network(tmp_path / "network.bin", **SIZES), z))
    assert 0.1 < y.std() < 0.95  # tanh of values of order one
    assert not np.array_equal(y, reference.forward(faces.network(seed=8, **SIZES), z))


def test_channels():
    with pytest.raises(InputError, match="two or more"):
        faces.network(channels=(512,))
