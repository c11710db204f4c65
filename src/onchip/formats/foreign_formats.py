"""Model files of other tools: how to convert them to a format that onchip reads."""

from __future__ import annotations

import zipfile
from pathlib import Path

from onchip.errors import InputError

_TORCH = (
    "in Python: module.load_state_dict(torch.load({path!r})); net = onchip.load(module.eval(), example)",
    "then onchip.save(net, {onnx!r}), for the command line",
)
_TORCHSCRIPT = ("in Python: net = onchip.load(torch.jit.load({path!r}), example)", _TORCH[1])
_KERAS = (
    "in Python: keras.models.load_model({path!r}).export({onnx!r}, format='onnx')",
    "or pip install tf2onnx; python -m tf2onnx.convert --keras {path!r} --output {onnx!r}",
)
_TFLITE = (
    "pip install tf2onnx; python -m tf2onnx.convert --tflite {path!r} --output {onnx!r} --dequantize",
    "or export the model that it was converted from: keras_model.export({onnx!r}, format='onnx')",
)
_OTHERS = {
    ".pt": ("PyTorch weights, without the code that uses them", _TORCH),
    ".pth": ("PyTorch weights, without the code that uses them", _TORCH),
    ".ckpt": ("a checkpoint, without the code that uses it", _TORCH),
    ".keras": ("a Keras model", _KERAS),
    ".h5": ("a Keras model", _KERAS),
    ".hdf5": ("a Keras model", _KERAS),
    ".tflite": ("a TensorFlow Lite model", _TFLITE),
}


def foreign_format_error(path: Path, known: list[str]) -> InputError | None:
    """The error for a known tool's file, with two lines that convert it; else None."""
    if path.suffix.lower() not in _OTHERS:
        return None
    what, lines = _OTHERS[path.suffix.lower()]
    if lines is _TORCH and _is_torchscript(path):
        what, lines = "a TorchScript module", _TORCHSCRIPT
    names = {"path": str(path), "onnx": str(path.with_suffix(".onnx"))}
    return InputError(
        f"cannot read {path}: another tool's format", got=f"suffix '{path.suffix}', {what}",
        expected=f"one of {', '.join(known)}", hint=tuple(line.format(**names) for line in lines),
    )  # fmt: skip


def _is_torchscript(path: Path) -> bool:
    """Whether it is an archive with code, as torch.jit.save writes; torch.save includes none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return False
