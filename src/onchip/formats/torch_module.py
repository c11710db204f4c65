"""A torch.nn.Module to a network: torch traces it into an ONNX graph, and the ONNX reader reads that."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from onchip.errors import FormatError, InputError
from onchip.formats.onnx_reader import parse_model, read_model
from onchip.spec.network import Network

OPSET = 17
MAX_WEIGHT_BYTES = (2 << 30) - (16 << 20)  # the graph goes through one protobuf, which ends at 2 GiB


def read_torch(module: Any, example: Any) -> Network:
    """The network of a module, as it is in eval mode; weights keep their names in the state_dict.

    example  what forward takes: a tensor or array (B, ...), or a tuple of them; the batch stays free
    """
    torch = sys.modules.get("torch")  # who has a module has imported it
    if torch is None or not isinstance(module, torch.nn.Module):
        raise InputError(
            "not a model", got=type(module).__name__, expected="a file, a workload's name, a Network or a torch module",
            hint="" if importlib.util.find_spec("torch") else "pip install 'onchip[torch]' for torch modules",
        )  # fmt: skip
    name = type(module).__name__
    if example is None:
        raise InputError(
            f"module {name} needs an example of what it takes", got="none", expected="a tensor with the batch in front",
            hint="onchip.load(module, torch.zeros(1, 784))",
        )  # fmt: skip
    nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    if nbytes > MAX_WEIGHT_BYTES:
        raise InputError(
            f"module {name} is too large to be traced", got=f"{nbytes:,} B of weights",
            expected=f"at most {MAX_WEIGHT_BYTES:,} B", hint="trace its parts, one by one",
        )  # fmt: skip
    data = _export(torch, module, _inputs(torch, module, example), name)
    try:
        return read_model(parse_model(data)).replace(name=name)
    except FormatError as error:  # of the reader, which knows the node but not the module
        raise InputError(
            f"module {name}: {error.what}", got=error.got, expected=error.expected, hint=error.hint
        ) from None


def _inputs(torch: Any, module: Any, example: Any) -> tuple[Any, ...]:
    device = next((weight.device for weight in module.parameters()), None)
    given = example if isinstance(example, tuple | list) else (example,)
    inputs = tuple(torch.as_tensor(one, device=device) for one in given)
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in inputs}
    if len(rows) != 1 or 0 in rows:
        got = ", ".join(str(list(tensor.shape)) for tensor in inputs) or "nothing"
        what = f"bad example for module {type(module).__name__}"
        raise InputError(what, got=got, expected="one batch in front of every input")
    # Two rows at least: tracing takes a 1 for a size that may be squeezed or stretched.
    return tuple(tensor if tensor.shape[0] > 1 else torch.cat([tensor, tensor]) for tensor in inputs)


def _export(torch: Any, module: Any, inputs: tuple[Any, ...], name: str) -> bytes:
    """The module as ONNX, by the exporter that needs nothing but torch itself."""
    names = [f"x{i}" for i in range(len(inputs))] if len(inputs) > 1 else ["x"]
    file = io.BytesIO()
    try:
        with _evaluating(module), _quiet(torch), torch.no_grad():
            made = module(*inputs)
            outputs = ["y"] if isinstance(made, torch.Tensor) else [f"y{i}" for i in range(len(made))]
            torch.onnx.export(
                module, inputs, file, input_names=names, output_names=outputs, opset_version=OPSET, dynamo=False,
                dynamic_axes={value: {0: "B"} for value in (*names, *outputs)},
                # Else it folds batch norms into convolutions, and weights lose their names. The planner folds, later.
                do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
            )  # fmt: skip
    except Exception as error:  # of the module's own forward, or one of the exporter's many
        told = error.__cause__ or error  # a warning that is an error comes wrapped
        what = str(told).strip().split("\n")[0]
        raise InputError(
            f"torch cannot trace module {name}", got=f"{type(told).__name__}: {what}",
            expected="a forward from the example to tensors that does not depend on the numbers, by operators of ONNX",
        ) from error  # fmt: skip
    return file.getvalue()


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Eval mode, and afterwards the mode that every part was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextlib.contextmanager
def _quiet(torch: Any) -> Iterator[None]:
    """Without what the exporter says about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A branch or a loop that depends on the numbers would be imported as it went with the example. torch's own
        # modules warn of checks that are none of the user's.
        warnings.filterwarnings("error", category=torch.jit.TracerWarning, module=r"(?!torch\b)")
        try:
            yield
        finally:
            logger.setLevel(level)
