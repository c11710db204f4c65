"""Small neural networks at the speed of the chip.

net    = onchip.load("model.onnx")            # or "decode", "digits", a .safetensors file
engine = onchip.compile(net)                  # or anything load accepts; picks the fastest device; see engine.plan
y      = engine(x)                            # NumPy in, NumPy out; inputs also by name
result = onchip.fit(net, x, classes)          # trains the same network
onchip.save(result.network, "trained.onnx")
totals = onchip.scan(x)                       # prefix sums, maxima, minima, products
with onchip.profile() as found: engine(x)     # where the time goes, kernel by kernel: print(found)
"""

from __future__ import annotations

from onchip.errors import MissingPackageError, OnchipError

TYPE_CHECKING = False  # importing typing takes longer than all of this file
if TYPE_CHECKING:
    from typing import Any

    from onchip.formats.torch.to_torch import to_torch
    from onchip.measure.profile import profile
    from onchip.network.build import mlp
    from onchip.network.graph import Network
    from onchip.plan.plan import Plan
    from onchip.runtime.engine import Engine
    from onchip.runtime.scan import scan
    from onchip.train.estimators import Classifier, Regressor
    from onchip.train.grid import fit_many
    from onchip.train.loop import fit
    from onchip.train.saved_estimators import load_estimator, save
    from onchip.train.text_classifier import TextClassifier
    from onchip.train.training_run import FitResult
    from onchip.train.training_step import training_step
    from onchip.workloads import load
    from onchip.workloads.compile import compile
    from onchip.workloads.predictor import predictor

__version__ = "0.2.0"
__all__ = [
    "Classifier", "Engine", "FitResult", "Network", "OnchipError", "Plan", "Regressor",
    "TextClassifier", "compile", "fit", "fit_many", "load", "load_estimator", "mlp", "predictor", "profile", "save",
    "scan", "to_torch", "training_step",
]  # fmt: skip

# The module of each name, imported on first use: `import onchip` loads no NumPy, no Numba and no device.
_HOME = {
    "Classifier": "train.estimators", "Engine": "runtime.engine", "FitResult": "train.training_run",
    "Network": "network.graph", "Plan": "plan.plan", "Regressor": "train.estimators",
    "TextClassifier": "train.text_classifier", "compile": "workloads.compile",
    "fit": "train.loop", "fit_many": "train.grid", "load": "workloads",
    "load_estimator": "train.saved_estimators", "mlp": "network.build",
    "predictor": "workloads.predictor", "profile": "measure.profile", "save": "train.saved_estimators",
    "scan": "runtime.scan",
    "to_torch": "formats.torch.to_torch", "training_step": "train.training_step",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'onchip' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(f"onchip.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise MissingPackageError(f"onchip.{name}", "scikit-learn", "sklearn") from None


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
