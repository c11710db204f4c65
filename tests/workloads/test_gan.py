"""A generator and its discriminator: their networks, random changes of pictures, and steps that continue bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import onchip
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import InputError, KernelError
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.types import BATCH, TensorType
from onchip.workloads import faces, gan
from onchip.workloads.frechet import FEATURES, FeatureNetwork, frechet_distance, nearest_difference
from onchip.workloads.gan import PictureSize
from onchip.workloads.gan_job import train_gan
from onchip.workloads.gan_training import GanOptions, GanRun, picture_bytes, squared

OPTIONS = GanOptions(width=2, latent=5, batch_size=7, epochs=2, augment=True, flip=True)


def pictures(n=20, side=8, colours=3, seed=0):
    """Flat ones, each of a colour of its own near (200, 120, 60), with some noise."""
    rng = np.random.default_rng(seed)
    colour = np.array([200, 120, 60][:colours]) + rng.integers(-20, 20, (n, 1, 1, colours))
    return (colour + rng.integers(-5, 6, (n, side, side, colours))).clip(0, 255).astype(np.uint8)


# -- networks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [8, 10, 12, 14, 28, 48, 64, 96])
def test_sizes_that_a_generator_doubles_up_to(side):
    size = PictureSize(side, 1)
    start, channels = gan.channels_of(size, 3)
    assert start << (len(channels) - 1) == side
    assert channels[-2:] == (3, 1)
    net = gan.generator(size, 1, 4, 0)
    assert net.output.row_shape == (side, side, 1)


@pytest.mark.parametrize("side", [1, 4, 7, 9, 30, 50, 65])
def test_other_sizes_are_refused(side):
    with pytest.raises(InputError, match="no generator for pictures of this size"):
        gan.channels_of(PictureSize(side, 3), 8)


def test_the_default_is_the_network_of_the_workload():
    assert gan.channels_of(PictureSize(64, 3), GanOptions.width) == (faces.START, faces.CHANNELS)
    assert GanOptions.latent == faces.LATENT


def test_first_pictures_have_no_checkerboard_pattern():
    """Within a picture, neighbours differ far less than pixels that are far apart."""
    net = gan.generator(PictureSize(32, 3), 4, 10, 0)
    x = reference.forward(net, np.random.default_rng(0).standard_normal((8, 10), np.float32))
    near = np.abs(np.diff(x, axis=2))[:, 4:-4, 4:-4].mean()
    far = np.abs(x[:, 4:-4, 16:-4] - x[:, 4:-4, 4:-16]).mean()
    assert near < far / 3


@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("colours", [1, 3])
def test_changes_shift_cut_and_brighten(B, colours):
    """By a loop over the pictures."""
    size, rng = PictureSize(12, colours), np.random.default_rng(B)
    x = rng.uniform(-1, 1, (B, *size.shape)).astype(np.float32)
    rows, columns, kept, brightness = changes = gan.draw_changes(size, B, rng)
    inputs, nodes, result = gan._augment(size, "real", "x")
    net = Network({"x": TensorType((BATCH, *size.shape)), **inputs}, tuple(nodes), (result,), {})
    got = reference.forward(net, (x, *changes))
    for i in range(B):
        (down,), (right,) = (np.unique(at[:, 0] - at[:, 1]) for at in (np.argwhere(rows[i]), np.argwhere(columns[i].T)))
        assert max(abs(down), abs(right)) <= round(12 * gan.MAX_SHIFT)
        shifted = np.zeros(size.shape)
        for y in range(12):
            for z in range(12):
                if 0 <= y - down < 12 and 0 <= z - right < 12:
                    shifted[y, z] = x[i, y - down, z - right]
        assert abs(brightness[i]) <= gan.BRIGHTNESS
        np.testing.assert_allclose(got[i], (shifted + brightness[i]) * kept[i], atol=1e-6)
        cut = np.argwhere(kept[i, ..., 0] == 0)
        if len(cut):
            height, width = np.ptp(cut, axis=0) + 1
            assert len(cut) == height * width
            assert max(height, width) <= 12 * gan.CUTOUT


def test_gradients_go_through_the_changes():
    """Those of the generator's step are slopes of its loss in float64, with running statistics frozen."""
    size, rng = PictureSize(8, 3), np.random.default_rng(0)
    net, judge = gan.generator(size, 2, 5, 0), gan.discriminator_weights(size, 2, 0)
    through = gan.generator_through(net, judge, size, True)
    inputs = rng.standard_normal((3, 5), np.float32), *gan.draw_changes(size, 3, rng)
    name, eps = "tconv1.weight", 1e-5
    step = onchip.training_step(through, trainable=name, loss="mse", device="cpu")
    gradient = step.gradients(*inputs, np.ones((3, 1), np.float32))[name]
    assert np.abs(gradient).max() > 1e-4
    for at in ((0, 0, 2, 2), (1, 2, 0, 3), (0, 1, 1, 1)):
        losses = []
        for sign in (1, -1):
            weight = net.weights[name].astype(np.float64)
            weight[at] += sign * eps
            logits = reference.forward(through.replace(weights={**through.weights, name: weight}), inputs)
            losses.append(np.mean((logits - 1) ** 2))
        assert gradient[at] == pytest.approx((losses[0] - losses[1]) / (2 * eps), rel=1e-3, abs=1e-6)


def test_the_logits_of_both_are_those_of_each():
    size, rng = PictureSize(8, 1), np.random.default_rng(0)
    net, judge = gan.generator(size, 2, 5, 0), gan.discriminator_weights(size, 2, 0)
    x, z = rng.uniform(-1, 1, (4, 8, 8, 1)), rng.standard_normal((4, 5))
    both = reference.forward(gan.discriminator_on_both(net, judge, size, False), (x, z))
    alone = gan.discriminator_alone(judge, size)
    assert np.array_equal(both[:, :1], reference.forward(alone, x))
    assert np.array_equal(both[:, 1:], reference.forward(alone, reference.forward(net, z)))
    assert np.array_equal(both[:, 1:], reference.forward(gan.generator_through(net, judge, size, False), z))


# -- training ------------------------------------------------------------------------------------------------------


def test_each_step_trains_one_of_the_two():
    run = GanRun(pictures(), OPTIONS, "cpu")
    before = run.checkpoint()
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((7, 8, 8, 3), np.float32), rng.standard_normal((7, 5), np.float32)
    changes = gan.draw_changes(run.size, 7, rng)
    run._of_judge(x, z, *changes, *changes, np.tile(np.float32([1, 0]), (7, 1)))
    between = run.checkpoint()
    run._of_generator(z, *changes, np.ones((7, 1), np.float32))
    after = run.checkpoint()
    for name in run._net.weights:
        is_statistic = name.endswith((".mean", ".var"))
        assert np.array_equal(before[f"g/{name}"], between[f"g/{name}"]) != is_statistic
        assert (between[f"g/{name}"] != after[f"g/{name}"]).any(), name
    for name in gan.discriminator_weights(run.size, 2, 0):
        assert (before[f"d/{name}"] != between[f"d/{name}"]).any(), name
        assert np.array_equal(between[f"d/{name}"], after[f"d/{name}"]) != name.endswith((".mean", ".var"))


def test_the_generator_learns_the_colour_of_the_pictures():
    run = GanRun(pictures(64), GanOptions(width=4, latent=4, batch_size=16, epochs=40, lr=2e-3, ema=0.9), "cpu")
    far = np.abs(run.samples(50).mean(axis=(0, 1, 2)) - [200, 120, 60]).max()
    train_gan(run)
    assert np.abs(run.samples(50).mean(axis=(0, 1, 2)) - [200, 120, 60]).max() < 0.75 * far


@pytest.mark.parametrize("stop", [1, 2, 3])  # an epoch has two steps
def test_a_run_continues_with_the_same_bits(tmp_path, stop):
    options = replace(OPTIONS, epochs=3)
    whole, stopped, then = (GanRun(pictures(), options, "cpu", threads=1) for _ in range(3))
    result = train_gan(whole, samples=tmp_path / "whole.png")

    def stop_there(progress):
        if stopped.steps_done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_gan(stopped, checkpoint=tmp_path / "run", checkpoint_every=0, on_progress=stop_there)
    again = train_gan(then, checkpoint=tmp_path / "run", resume=True, samples=tmp_path / "then.png")
    assert again.epoch_losses == result.epoch_losses
    assert again.score == result.score
    assert then.checkpoint().keys() == whole.checkpoint().keys()
    for name, array in whole.checkpoint().items():
        assert array.tobytes() == then.checkpoint()[name].tobytes(), name
    for suffix in (".png", ".gif"):
        assert (tmp_path / f"whole{suffix}").read_bytes() == (tmp_path / f"then{suffix}").read_bytes()
    assert len(list((tmp_path / "run").iterdir())) <= 2


@pytest.fixture(params=[pytest.param("emulated", marks=needs_gxx), pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    if request.param == "emulated":
        emulate_device(monkeypatch)
    return "cuda"


def test_a_gpu_trains_the_same(gpu):
    on_cpu, on_gpu = (GanRun(pictures(), OPTIONS, device) for device in ("cpu", gpu))
    for _ in range(2):
        expected, got = on_cpu.step(), on_gpu.step()
        assert [float(loss) for loss in got] == pytest.approx([float(loss) for loss in expected], rel=1e-3)
    for name, array in on_cpu.weights().items():
        np.testing.assert_allclose(on_gpu.weights()[name], array, atol=2e-3)
    assert np.abs(on_gpu.samples(5).astype(int) - on_cpu.samples(5)).max() <= 2


def test_bits_depend_on_the_seed_alone():
    def bits(seed):
        run = GanRun(pictures(), replace(OPTIONS, seed=seed, epochs=1), "cpu")
        train_gan(run)
        return run.network().weights["tconv1.weight"].tobytes()

    assert bits(0) == bits(0) != bits(1)


def test_checkpoints_of_others_are_refused(tmp_path):
    def run(options=OPTIONS, images=None, **how):
        train_gan(GanRun(pictures() if images is None else images, options, "cpu"), checkpoint=tmp_path, **how)

    run()
    with pytest.raises(InputError, match="the folder has checkpoints of another run"):
        run()
    with pytest.raises(InputError, match="belongs to another run"):
        run(replace(OPTIONS, lr=1e-3), resume=True)
    with pytest.raises(InputError, match="belongs to another run"):
        run(images=pictures(seed=1), resume=True)
    run(replace(OPTIONS, epochs=3), resume=True)  # more epochs
    newest = max(tmp_path.iterdir())
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    with pytest.raises(InputError, match="is damaged"):
        run(replace(OPTIONS, epochs=3), resume=True)
    onchip.save(onchip.mlp(2, 2), newest.with_suffix(".safetensors"))
    with pytest.raises(InputError, match="no checkpoint of onchip train faces"):
        run(replace(OPTIONS, epochs=3), resume=True)


def test_a_run_that_diverges_says_so(monkeypatch):
    run = GanRun(pictures(), replace(OPTIONS, lr=1e30), "cpu")
    with pytest.raises(KernelError, match="training diverged in epoch"), np.errstate(all="ignore"):
        train_gan(run)


def test_bad_options_and_too_few_pictures():
    for bad in ({"width": 0}, {"latent": 0}, {"epochs": 0}, {"lr": -1.0}, {"ema": 1.0}):
        with pytest.raises(InputError, match="bad"):
            GanOptions(**bad)
    with pytest.raises(InputError, match="too few pictures"):
        GanRun(pictures(15), OPTIONS, "cpu")


def test_samples_are_the_pictures_of_the_saved_network(tmp_path):
    run = GanRun(pictures(), OPTIONS, "cpu")
    run.step()
    onchip.save(run.network(), tmp_path / "faces.onnx")
    z = np.random.default_rng(3).standard_normal((70, 5), np.float32)
    expected = picture_bytes(onchip.compile(tmp_path / "faces.onnx", "cpu")(z))
    got = run.samples(70, seed=3)
    assert got.shape == (70, 8, 8, 3)
    assert np.abs(got.astype(int) - expected).max() <= 1


def test_a_square_of_pictures_is_in_rows():
    images = np.arange(4).reshape(4, 1, 1, 1) * np.ones((1, 2, 3, 1), int)
    assert squared(images)[::2, ::3, 0].tolist() == [[0, 1], [2, 3]]


# -- the score -----------------------------------------------------------------------------------------------------


def test_the_frechet_distance_of_normal_distributions():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((200_000, 3)) * [1, 2, 3] + [0, 1, 0], rng.standard_normal((200_000, 3)) * [2, 2, 1]
    assert frechet_distance(a, b) == pytest.approx(1 + 1 + 0 + 4, rel=0.02)  # |means|^2 + (deviations' differences)^2
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    assert frechet_distance(a @ turn, b @ turn) == pytest.approx(frechet_distance(a, b), rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a[:, :1], b[:, :1]) == pytest.approx(1, rel=0.05)


def test_the_nearest_picture_is_found_also_mirrored():
    others = np.random.default_rng(0).integers(0, 256, (1100, 4, 5, 3), dtype=np.uint8)
    assert nearest_difference(others[[3, 1050]], others) == 0
    assert nearest_difference(others[:7, :, ::-1], others) == 0
    near = others[:5].astype(int) + np.where(others[:5] < 128, 10, -10)
    assert nearest_difference(near.astype(np.uint8), others) == pytest.approx(10)
    assert nearest_difference(others[:300], others[300:]) > 40


def test_the_distance_grows_with_the_difference():
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    images[:, :4] //= 4  # dark above
    net = FeatureNetwork(images[:40], PictureSize(8, 3), "cpu", 1)
    assert net.features(images).shape == (60, FEATURES)
    near, turned, flat = (net.distance(images[40:], x) for x in (images[:40], images[:40, ::-1], images[:40] * 0 + 99))
    assert near < turned
    assert near < flat
