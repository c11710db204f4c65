"""Forged checkpoints: the digest matches, but no run could have written them. Each is refused."""

import contextlib
import copy
import hashlib
import json
import math

import ml_dtypes
import numpy as np
import pytest

from checks import rows
from onchip.errors import FormatError, InputError, KernelError
from onchip.formats.weights.tensor_file import read_tensors
from onchip.network.build import mlp
from onchip.train.loop import fit

X, Y = rows(60, 5), np.arange(60) % 3
NUMBERS = rows(60, 3)
OPTIONS = {"lr": 0.05, "batch_size": 16, "epochs": 6, "device": "cpu", "threads": 1}
RUNS = {  # what is trained, how, and after how many steps it is stopped; an epoch has 4, or 3 with validation rows
    "amid an epoch": (Y, {"optimiser": "adam", "validation": 0.3, "patience": 4}, 7),
    "behind an epoch": (Y, {"momentum": 0.9, "schedule": "step", "step_every": 1}, 8),
    "done": (NUMBERS, {"loss": "mse", "epochs": 2}, 8),
    "two outputs": ((NUMBERS, rows(60, 4)), {"loss": "mse", "loss_weights": {"relu1": 0.5}, "validation": 0.3}, 5),
}


class StoppedError(Exception):
    pass


def train(run, folder=None, **more):
    y, options, _ = RUNS[run]
    kept = {} if folder is None else {"checkpoint": folder, "checkpoint_every": 0.0}
    net = mlp(5, 4, 3)
    if run == "two outputs":
        net = net.replace(outputs=(*net.outputs, net.nodes[1].name))
    return fit(net, X, y, **OPTIONS | options, **kept, **more)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """For each run, the JSON and the arrays of its checkpoint."""
    found = {}
    for run, (_, _, stop) in RUNS.items():
        folder = tmp_path_factory.mktemp("run")

        def end_here(progress, stop=stop, folder=folder):
            if any(folder.glob(f"checkpoint-{stop:012d}*")):
                raise StoppedError

        with contextlib.suppress(StoppedError):
            train(run, folder, on_progress=end_here, debug=True)  # debug: one step at a time
        metadata, arrays = read_tensors(folder / f"checkpoint-{stop:012d}.safetensors")
        found[run] = json.loads(metadata["onchip_checkpoint"]), arrays
    return found


def digest_of(text, arrays):
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode(errors="surrogatepass"))
        digest.update(array.tobytes())
    return digest.hexdigest()


TAGS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
        "uint8": "U8", "bool": "BOOL"}  # fmt: skip


def write(folder, text, arrays, metadata=None):
    """Write a checkpoint with this text, these arrays and a matching digest, or this metadata."""
    text = text if isinstance(text, str) else json.dumps(text)
    header = {"__metadata__": {"onchip_checkpoint": text, "sha256": digest_of(text, arrays)}}
    if metadata is not None:
        header["__metadata__"] = metadata(header["__metadata__"])
    data = b""
    for name, array in arrays.items():
        place = (len(data), len(data) + array.nbytes)
        header[name] = {"dtype": TAGS[array.dtype.name], "shape": array.shape, "data_offsets": place}
        data += array.tobytes()
    packed = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint-000000000099.safetensors").write_bytes(len(packed).to_bytes(8, "little") + packed + data)


def refusal(folder, run):
    try:
        train(run, folder, resume=True)
    except InputError as error:
        return error
    return None


def assert_refused(folder, run, what):
    error = refusal(folder, run)
    assert error is not None, f"accepted: {what}"
    assert str(folder) in error.what, what
    assert "" not in (error.got, error.expected, error.hint), what


@pytest.mark.parametrize("run", RUNS)
def test_a_genuine_checkpoint_resumes_with_the_same_bits(tmp_path, kept, run):
    write(tmp_path, *kept[run])
    whole, resumed = train(run), train(run, tmp_path, resume=True)
    assert np.array_equal(resumed.losses, whole.losses)
    assert resumed.best_epoch == whole.best_epoch
    for name, w in whole.network.weights.items():
        assert np.array_equal(resumed.network.weights[name], w)


# -- the JSON ------------------------------------------------------------------------------------------------------

NEVER = [None, True, -1, -1.0, -(10**400), math.nan, math.inf, -math.inf, 10**400, "", "1", "\ud800", [], [1], {},
         {"a": 1}]  # fmt: skip
ELSEWHERE = [False, 0, 1, 2, 5, 10**6, 10**9, 2**63, 0.0, 0.5, 1.5, 1e300]
# Measured values: only impossible ones are refused.
OPEN = (
    "seconds",
    "epoch_seconds",
    "samples_per_s",
    "accuracy",
    "validation_accuracy",
    "validation_loss",
    "epoch_correct",
)


def places(told, path=()):
    """The path to every value of the JSON, including lists and objects."""
    yield path
    inside = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def at(told, path):
    for key in path:
        told = told[key]
    return told


def changed(told, path, value):
    if not path:
        return value
    told = copy.deepcopy(told)
    at(told, path[:-1])[path[-1]] = value
    return told


def forgeries(told, path):
    """The JSON with the value at this path changed, removed or added to."""
    true = at(told, path)
    for value in NEVER + (ELSEWHERE if not path or path[-1] not in OPEN else []):
        if json.dumps(value) != json.dumps(true) and not (value == true and type(value) is not bool):
            yield f"{path} = {value!r:.40}", changed(told, path, value)
    if type(true) is int and path[-1] not in OPEN:
        yield f"{path} as a float", changed(told, path, float(true))
    if path:
        less = copy.deepcopy(told)
        del at(less, path[:-1])[path[-1]]
        yield f"no {path}", less
    if isinstance(true, dict):
        yield f"more in {path}", changed(told, path, {**true, "more": 1})
    if isinstance(true, list):
        yield f"more in {path}", changed(told, path, [*true, *true[-1:], 1])
        yield f"{path} twice", changed(told, path, true + true if true else [[]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("run", RUNS)
def test_json_that_no_run_writes_is_refused(tmp_path, kept, run):
    told, arrays = kept[run]
    count = 0
    for path in places(told):
        if path[:1] == ("job",) and run != "amid an epoch":  # the same in every run
            continue
        for what, forged in forgeries(told, path):
            write(tmp_path, forged, arrays)
            assert_refused(tmp_path, run, what)
            count += 1
    assert count > 200


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", '{"version": 1, "version": 1}', "[" * 100_000, "[" * 700 + "]" * 700, "1" * 10_000, "\ud800"],
    ids=lambda text: f"{text[:12]!a}",
)
def test_text_that_is_no_such_json_is_refused(tmp_path, kept, text):
    write(tmp_path, text, kept["done"][1])
    assert_refused(tmp_path, "done", text[:20])


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 900, 950, 970, 990])
def test_deep_nesting_is_refused(tmp_path, kept, depth):
    told, arrays = kept["done"]
    deep = "[" * depth + "]" * depth
    for name in ("history", "epoch", "job"):
        write(tmp_path, json.dumps(told | {name: "DEEP"}).replace('"DEEP"', deep), arrays)
        assert_refused(tmp_path, "done", f"{name}, {depth} levels")


@pytest.mark.parametrize(
    "metadata",
    [
        lambda m: None,
        lambda m: [],
        lambda m: "text",
        lambda m: {},
        lambda m: {"onchip_checkpoint": m["onchip_checkpoint"]},
        lambda m: {"sha256": m["sha256"]},
        lambda m: m | {"more": ""},
        lambda m: m | {"onchip_checkpoint": json.loads(m["onchip_checkpoint"])},
        *(lambda m, digest=digest: m | {"sha256": digest} for digest in (None, 1, True, [], {}, [[]], "", "0" * 64)),
    ],
)
def test_metadata_that_no_run_writes_is_refused(tmp_path, kept, metadata):
    write(tmp_path, *kept["done"], metadata)
    assert_refused(tmp_path, "done", "metadata")


@pytest.mark.parametrize("version", [0, 2, 3, 4, -1, 10**9])
def test_another_version_is_refused_as_that(tmp_path, kept, version):
    write(tmp_path, {"version": version, "as_it_was": "then"}, kept["done"][1])
    with pytest.raises(InputError, match="is of another version") as caught:
        train("done", tmp_path, resume=True)
    assert str(version) in caught.value.got


# -- the arrays ------------------------------------------------------------------------------------------------------


def with_one(array, value):
    array = array.copy()
    array.reshape(-1)[-1:] = value
    return array


def other_arrays(arrays, name):
    """Wrong replacements of an array, and None."""
    array = arrays[name]
    yield "missing", {other: a for other, a in arrays.items() if other != name}
    for called in (f"{name}x", f"more/{name}", name.partition("/")[2] or "weight/losses", f"/{name}", "\ud800"):
        yield f"renamed {called!a}", {called if other == name else other: a for other, a in arrays.items()}
    shaped = [array[..., None], array[None], array[:-1], array[..., :0], np.concatenate([array, array])]
    shaped += [array.reshape(-1), np.float32(1).reshape(()), array.T]
    dtypes = [np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_, ml_dtypes.bfloat16]
    with np.errstate(invalid="ignore"):  # some values of one type do not fit the other
        shaped += [array.astype(dtype) for dtype in dtypes]
    for i, other in enumerate(shaped):
        if other.shape != array.shape or other.dtype != array.dtype:
            yield f"as {i}", arrays | {name: np.ascontiguousarray(other).reshape(other.shape)}
    if array.dtype.kind == "f":
        yield "nan", arrays | {name: with_one(array, np.nan)}
        if not name.startswith("state/"):
            yield "inf", arrays | {name: with_one(array, np.inf)}
    if name == "losses" or name.startswith("state/square"):
        yield "negative", arrays | {name: with_one(array, -1e-3)}
    if name == "state/steps":
        for steps in (-1, 0, array[0] - 1, array[0] + 1, 2**62):
            yield f"{steps} steps", arrays | {name: np.array([steps])}


@pytest.mark.parametrize("run", RUNS)
def test_arrays_that_no_run_writes_are_refused(tmp_path, kept, run):
    told, arrays = kept[run]
    for name in arrays:
        for what, forged in other_arrays(arrays, name):
            write(tmp_path, told, forged)
            assert_refused(tmp_path, run, f"{name}: {what}")
    for name in ("more", "weight/more", "state/more", "best/more", "losses/more", "weight/"):
        write(tmp_path, told, arrays | {name: np.zeros(3, np.float32)})
        assert_refused(tmp_path, run, f"also {name}")


# -- consistent values that do not fit the run -------------------------------------------------------------------


@pytest.mark.parametrize(("epoch", "step"), [(-1, 3), (0, -1), (1, -1), (2, 3), (1, 10), (7, 0), (6, 1), (6, -1)])
def test_an_impossible_position_is_refused(tmp_path, kept, epoch, step):
    told, arrays = kept["amid an epoch"]
    entries = [told["history"][0] | {"epoch": i + 1, "loss": 1.0} for i in range(max(0, epoch))]
    total = max(0, epoch * 3 + step)
    forged = told | {"epoch": epoch, "step": step, "epoch_rows": 16 * step, "epoch_correct": 0, "history": entries}
    steps = {"losses": np.ones(total), "state/steps": np.array([total])}
    write(tmp_path, forged | {"best_epoch": min(1, len(entries))}, arrays | steps)
    assert_refused(tmp_path, "amid an epoch", f"epoch {epoch}, step {step}")


def test_an_epoch_after_the_end_of_the_run_is_refused(tmp_path, kept):
    told, arrays = kept["amid an epoch"]  # patience 4: the first epoch is the best, so the fifth is the last
    for done, step in ((5, 1), (6, 0)):
        entries = [told["history"][0] | {"epoch": i + 1, "loss": 1.0, "validation_loss": 1.0} for i in range(done)]
        forged = told | {"epoch": done, "step": step, "epoch_rows": 16 * step, "epoch_correct": 0, "best_epoch": 1}
        steps = {"losses": np.ones(3 * done + step), "state/steps": np.array([3 * done + step])}
        write(tmp_path, forged | {"history": entries}, arrays | steps)
        assert_refused(tmp_path, "amid an epoch", f"{done} epochs, step {step}")


def test_a_forged_one_is_called_damaged_and_the_last_good_one_named(tmp_path, kept):
    told, arrays = kept["behind an epoch"]
    write(tmp_path, told, arrays)
    good = (tmp_path / "checkpoint-000000000099.safetensors").rename(tmp_path / "checkpoint-000000000008.safetensors")
    write(tmp_path, told | {"step": -1}, arrays)
    with pytest.raises(FormatError, match="is damaged") as caught:
        train("behind an epoch", tmp_path, resume=True)
    assert "step" in caught.value.got
    assert "-1" in caught.value.got
    assert str(good) in caught.value.hint


# -- diverging runs and invalid optimiser states -------------------------------------------------------------------


def test_a_run_that_diverges_leaves_no_checkpoint_that_is_not_finite(tmp_path):
    x = rows(3000, 5) * np.float32(1e4)  # of one row a batch: chunks of an epoch, with a checkpoint after each
    with pytest.raises(KernelError, match="training diverged"):
        fit(mlp(5, 4, 3), x, np.arange(3000) % 3, **OPTIONS | {"lr": 1e30, "batch_size": 1}, checkpoint=tmp_path,
            checkpoint_every=0.0)  # fmt: skip
    for path in tmp_path.iterdir():
        assert all(np.isfinite(array).all() for array in read_tensors(path)[1].values())


@pytest.mark.parametrize(
    "change",
    [
        {"steps": np.array([-1])},
        {"steps": np.array([], np.int64)},
        {"steps": 3},
        {"steps": np.array([2**63 - 1])},
        {"square:fc1.bias": np.full(4, -1, np.float32)},
        {"mean:fc1.bias": np.full(4, np.nan, np.float32)},
        {"mean:fc1.bias": [0.0] * 4},
        {"mean:fc1.bias": np.zeros(3, np.float32)},
    ],
)
def test_a_state_that_no_optimiser_has_is_refused(change):
    options = OPTIONS | {"optimiser": "adam", "epochs": 1}
    state = fit(mlp(5, 4, 3), X, Y, **options).state
    with pytest.raises(FormatError):
        fit(mlp(5, 4, 3), X, Y, **options, state=state | change)
