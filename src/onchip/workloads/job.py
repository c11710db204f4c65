"""The network of a run: by name or file, with weights from a file or random ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip import __version__
from onchip.errors import InputError
from onchip.formats.graph_json import graph_to_json
from onchip.formats.load import shapes_error
from onchip.formats.weights.tensor_file import digest_of
from onchip.network.graph import Network
from onchip.plan.kernel import Job
from onchip.plan.plan_json import array_weights, recipes_to_json
from onchip.workloads import WORKLOADS, faces, load, sentiment

if TYPE_CHECKING:
    from onchip.formats.onnx.shapes import Shapes

WEIGHT_FILES = {"sentiment": "params.bin", "faces": "network.bin"}  # workloads with a weight file, and its usual name


def job_network(
    model: str,
    weights: Path | None = None,
    pixels: bool = False,
    lengths: bool = False,
    shapes: Shapes | None = None,
) -> Network:
    """Build a network by name or load it from a file; `weights` is for workloads with a weight file. Without one,
    faces is the trained generator that comes with onchip.

    pixels   results will be drawn: faces then returns bytes
    lengths  sentences have individual lengths: sentiment then reads them as a second input
    shapes   sizes of inputs that an ONNX file leaves open
    """
    if shapes is not None and model in WEIGHT_FILES:
        raise shapes_error(model)
    if model == "faces":
        return faces.shipped(pixels=pixels) if weights is None else faces.network(weights, pixels=pixels)
    if model == "sentiment":
        return sentiment.network(weights, lengths=lengths)
    if weights is not None:
        got, expected = f"--weights {weights} for {model}", " or ".join(WEIGHT_FILES)
        raise InputError("this model has no weight file", got=got, expected=expected, hint="omit --weights")
    return load(model, shapes=shapes)


def weights_note(model: str, weights: Path | None, net: Network) -> list[str]:
    """What the weights are: a warning for random ones, whose results are meaningless."""
    if model == "faces" and weights is None:
        return ["weights: the generator that comes with onchip; its pictures are synthetic, of no person"]
    if weights is not None or model not in WORKLOADS or not net.weights:
        return []
    return ["weights: random, from seed 0; the results mean nothing"]


def run_record(
    model: str, net: Network, files: Mapping[str, Path], job: Job, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that determines the results of a run, for its manifest: a run resumes only if it is unchanged.

    files    the inputs, identified by path, size and modification time
    options  of the command line
    """
    text = graph_to_json(net) + recipes_to_json(net) + net.meaning.to_text()
    network = digest_of(text, array_weights(net))
    stats = {name: (path, path.stat()) for name, path in files.items()}
    changed = {name: (str(path.resolve()), stat.st_size, stat.st_mtime_ns) for name, (path, stat) in stats.items()}
    return {
        "onchip": __version__, "model": model, "network": network, "inputs": changed,
        "outputs": {name: str(net.types[name]) for name in net.outputs},
        "precision": job.precision, "tables": job.tables, "without": job.without, **options,
    }  # fmt: skip
