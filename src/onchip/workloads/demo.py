"""demo: train, save, load, plan, check, time and draw, on the bundled digits."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onchip.errors import InputError, KernelError, OutputError
from onchip.files import atomic_write, check_memory
from onchip.formats.images import PngWriter
from onchip.formats.load import load_file, save
from onchip.formats.tables.csv_writer import top_classes
from onchip.kernels import reference
from onchip.network.graph import Network
from onchip.network.layers import Linear
from onchip.network.recipe import Array, materialise
from onchip.plan.floor import settle_floors
from onchip.plan.plan import Plan
from onchip.runtime.check import FACTOR, ULP, ULPS, scaled_error
from onchip.runtime.cpu.backend import core_count, this_cpu
from onchip.runtime.engine import Engine, compile
from onchip.text.shipped import SHIPPED
from onchip.text.text_rows import encode_texts
from onchip.train.training_run import Progress
from onchip.workloads import digits, faces
from onchip.workloads.classify import Trained, train_and_test
from onchip.workloads.dataset import Dataset
from onchip.workloads.digits_picture import draw_digits

# 97 to 98 % of the test rows in a fraction of a second; the defaults of `train` are for MNIST.
EPOCHS, LR, BATCH_SIZE, SEED = 30, 0.1, 32, 0
SENTENCE = "a waste of time"
ROWS = 20_000  # a second or two of timing on two cores
_ROW_BYTES = 1024  # per row over all engines: 64 pixels, 10 results, some copies
REPEATS = 7
FACES = 16  # drawn


@dataclass(frozen=True)
class Timing:
    """Time and error of one implementation on the same rows and network."""

    engine: str
    device: str  # "cpu" or "cuda:0"
    median_ms: float
    p20_ms: float
    p80_ms: float
    error: float  # max |y - truth| / max |truth|


def train_digits(
    folder: Path, epochs: int = EPOCHS, on_progress: Callable[[Progress], None] | None = None
) -> tuple[Dataset, Trained]:
    """Train 64-320-160-10 on the bundled digits; creates `folder` for the results first."""
    if epochs < 1:
        raise InputError("bad number of epochs", got=str(epochs), expected="at least 1", hint=f"--epochs {EPOCHS}")
    make_folder(folder)
    data = digits.load_data("sklearn")
    net = digits.network(data.inputs, seed=SEED)
    options = replace(digits.TRAIN, lr=LR, batch_size=BATCH_SIZE, epochs=epochs, seed=SEED)
    return data, train_and_test(net, data, options, on_progress=on_progress)


def score_sentence(text: str) -> tuple[str, float]:
    """The label of a sentence and its probability, by the sentiment model that ships with onchip."""
    net = load_file(SHIPPED["sentiment"])
    ((answer,),) = top_classes(compile(net, "cpu", batch_hint=1)(encode_texts([text], net)), net.meaning.classes, 1)
    return answer


def check_rows_to_time(rows: int) -> None:
    if rows < 1:
        raise InputError("bad number of rows", got=str(rows), expected="at least 1", hint=f"--rows {ROWS}")
    check_memory(rows * _ROW_BYTES, f"--rows {rows}")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = error.strerror or str(error)
        raise OutputError(
            f"cannot create folder {folder}", got=got, expected="a writable folder", hint="another one: --out DIR"
        ) from None


def save_and_load(folder: Path, net: Network, x: Array, rows: int = ROWS) -> tuple[Engine, tuple[Path, ...]]:
    """Save the network in both formats and compile it from the file, as a user would, for so many rows."""
    files = (folder / "digits.onnx", folder / "digits.safetensors")
    for path in files:
        save(net, path)
    engine, twin = (compile(load_file(path), batch_hint=rows) for path in files)
    if engine(x).tobytes() != twin(x).tobytes():
        raise KernelError("the files give different results", got=str(files[1]), expected=f"the bits of {files[0]}")
    return engine, files


# -- timing ------------------------------------------------------------------------------------------------


def time_rows(
    engine: Engine, images: Array, rows: int = ROWS, on_progress: Callable[[float, str], None] | None = None
) -> tuple[Timing, ...]:
    """Time `rows` rows, the images repeated, with onchip, NumPy and, if installed, PyTorch.

    All read and return NumPy arrays, so on a GPU the copies count. PyTorch runs on onchip's device if it can. Each
    result is first checked against float64: a wrong one is not timed. The runs are interleaved, so that other load on
    the machine affects all of them. on_progress receives the fraction done and the current task.
    """
    check_rows_to_time(rows)
    report = on_progress or (lambda part, what: None)
    net, x = engine.plan.network, np.resize(images, (rows, images.shape[1]))
    truth = reference.forward(net, images, "float64")
    allowed = FACTOR * scaled_error(reference.forward(net, images, "float32"), truth) + ULPS * ULP["fp32"]
    truth = np.resize(truth, (rows, truth.shape[1]))  # repeated like the images
    ours = engine.chosen.partition(" ")[0]
    runners: dict[str, Callable[[Array], Array]] = {"onchip": engine, "NumPy, layer by layer": numpy_layers(net)}
    devices = {"onchip": ours, "NumPy, layer by layer": "cpu"}
    if (in_torch := torch_layers(net, ours)) is not None:
        runners["PyTorch, layer by layer"], devices["PyTorch, layer by layer"] = in_torch
    report(0.0, "checking")
    errors = {name: scaled_error(run(x), truth) for name, run in runners.items()}
    for name, error in errors.items():
        if error > allowed:
            expected = f"at most {allowed:.1e}"
            raise KernelError(f"{name} is wrong, so it is not timed", got=f"error {error:.1e}", expected=expected)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(REPEATS):
        report(i / REPEATS, f"round {i + 1} of {REPEATS}")
        for name, run in runners.items():
            run(x)  # untimed: threads of the previous engine still spin, which would cost PyTorch a factor of two
            start = time.perf_counter()
            run(x)
            times[name].append(1e3 * (time.perf_counter() - start))
    timings = []
    for name, samples in times.items():
        p20, median, p80 = np.percentile(samples, [20, 50, 80]).tolist()
        timings.append(Timing(name, devices[name], median, p20, p80, errors[name]))
    return tuple(timings)


def plan_with_floor(plan: Plan, median_ms: float) -> tuple[Plan, str]:
    """The plan with its floor from the current CPU rates, and a note on that floor.

    If a run beats its floor, the rates were measured while the machine was busy; they are measured again.
    """
    if plan.device.kind != "cpu":
        return plan, ""
    floors = settle_floors(
        lambda: {"": replace(plan, device=this_cpu()).floor_us / 1e3}, {"": median_ms},
        functools.partial(this_cpu, measure=True),
    )  # fmt: skip
    too_low = "the run took less than this floor: the rates of this CPU were measured under load"
    return replace(plan, device=this_cpu()), too_low if floors[""].note else ""


def used_weights(net: Network) -> dict[str, Array]:
    return {name: materialise(name, net.weights) for node in net.nodes for name in node.weights.values()}


def numpy_layers(net: Network) -> Callable[[Array], Array]:
    """Linear and ReLU in plain NumPy: a matmul, an add and a maximum per layer, without extra copies."""
    weights = used_weights(net)

    def run(x: Array) -> Array:
        for node in net.nodes:
            if isinstance(node.layer, Linear):
                x = x @ weights[node.weights["weight"]].T
                x += weights[node.weights["bias"]]
            else:
                np.maximum(x, 0, out=x)
        return x

    return run


def torch_layers(net: Network, wanted: str) -> tuple[Callable[[Array], Array], str] | None:
    """The same in PyTorch, and its device; None if PyTorch is not installed.

    wanted  "cuda:0": used if PyTorch can; else the CPU with all cores
    """
    try:
        import torch
    except (ImportError, OSError):  # OSError: installed, but one of its libraries is missing
        return None
    device = wanted if wanted.startswith("cuda") and torch.cuda.is_available() else "cpu"
    torch.set_num_threads(core_count())
    weights = {name: torch.from_numpy(w.copy()).to(device) for name, w in used_weights(net).items()}

    def run(x: Array) -> Array:
        with torch.inference_mode():
            y = torch.from_numpy(x).to(device)
            for node in net.nodes:
                if isinstance(node.layer, Linear):
                    y = torch.nn.functional.linear(y, weights[node.weights["weight"]], weights[node.weights["bias"]])
                else:
                    y = torch.relu_(y)
            out: Array = y.cpu().numpy()  # synchronises with the GPU
            return out

    return run, device


# -- picture ---------------------------------------------------------------------------------------------


def draw_faces(folder: Path) -> Path:
    """Synthetic portraits by the generator that comes with onchip."""
    net = faces.shipped(pixels=True)
    pictures = compile(net, "cpu")(np.random.default_rng(0).standard_normal((FACES, faces.LATENT), np.float32))
    path = folder / "faces.png"
    with PngWriter(path, pictures.shape, pictures.dtype) as file:
        file.write(pictures)
    return path


def draw(folder: Path, data: Dataset, trained: Trained) -> Path:
    path = folder / "digits.svg"
    with atomic_write(path) as file:
        file.write(draw_digits(data, trained).encode())
    return path
