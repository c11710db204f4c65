"""torch.nn.Module to a network: torch traces it to an ONNX graph, which the ONNX reader converts."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onchip.errors import FormatError, InputError
from onchip.formats.onnx.ops.missing import FLOAT_MODEL
from onchip.formats.onnx.reader import parse_model, read_model
from onchip.formats.torch.exporter import NoExporterError, export_module
from onchip.formats.torch.functions import plain_functions
from onchip.formats.value_names import name_values
from onchip.network.graph import Network
from onchip.network.names import free_name
from onchip.network.recipe import Array
from onchip.network.text import plural

OPSET = 17
_BETWEEN = ("_compile.py", "eval_frame.py")  # torch's frames between a forward and the dispatch mode
TraceWarnings = dict[tuple[str, int | None], str]  # file and line -> torch's warning
MAX_WEIGHT_BYTES = (2 << 30) - (16 << 20)  # the graph is one protobuf, limited to 2 GiB


@dataclass(frozen=True)
class TorchModule:
    """A module to load and its inputs. A copy if it can be copied: a forward may change its module."""

    module: Any
    inputs: tuple[Any, ...]  # tensors of two rows or more
    names: tuple[str, ...]  # of the network's inputs
    by_keyword: bool  # forward receives them by these names

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def run(self, inputs: tuple[Any, ...], in_double: bool = False) -> tuple[Any, ...]:
        """The tensors that the module returns in eval mode, computed in float64 or in its own dtypes.

        InputError if it fails for these values, or in float64.
        """
        torch = sys.modules["torch"]
        state: dict[str, Any] = {}
        if in_double:
            state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            state = {name: tensor.double() for name, tensor in state.items() if tensor.is_floating_point()}
            inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        with self.called(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = torch.func.functional_call(self.module, state, inputs) if state else self.module(*inputs)
            except Exception as error:
                raise InputError(f"module {self.name} failed on these rows", got=str(error)) from error
        return _tensors(torch, result)

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A context: eval mode, no gradients, no torch.compile, positional arguments."""
        torch, original = sys.modules["torch"], vars(self.module).get("forward")
        # Always positional: torch's exporters mishandle keyword arguments and defaults.
        is_patched = self.by_keyword or not isinstance(self.module, torch.jit.ScriptModule)
        with _evaluating(self.module), torch.no_grad(), _as_written(torch):
            if is_patched:
                names = self.names if self.by_keyword else ()
                self.module.forward = _by_position(self.module.forward, names)
            try:
                yield
            finally:
                if is_patched and original is None:
                    del self.module.forward
                elif is_patched:
                    self.module.forward = original


def take_module(module: Any, example: Any) -> TorchModule:
    """Check a module and its example.

    example  the input of forward: a tensor or array (B, ...), a tuple of them, or a dict of them by keyword
    """
    torch = sys.modules.get("torch")  # a caller with a module has imported torch
    if torch is None or not isinstance(module, torch.nn.Module):
        raise InputError(
            "not a model", got=type(module).__name__, expected="a file, a workload's name, a Network or a torch module",
            hint="" if importlib.util.find_spec("torch") else "pip install 'onchip[torch]' for torch modules",
        )  # fmt: skip
    module = unwrapped(torch, module)
    name = type(module).__name__
    if example is None:
        raise InputError(
            f"module {name} needs an example input", got="none", expected="a tensor (B, ...)",
            hint="onchip.load(module, torch.zeros(1, 784))",
        )  # fmt: skip
    nbytes = sum(getattr(tensor, "nbytes", 0) for tensor in module.state_dict().values())
    if nbytes > MAX_WEIGHT_BYTES:
        raise InputError(
            f"module {name} is too large to be traced", got=f"{nbytes:,} B of weights",
            expected=f"at most {MAX_WEIGHT_BYTES:,} B", hint="load its submodules one by one",
        )  # fmt: skip
    with contextlib.suppress(Exception):  # some cannot be copied: those with locks, files, non-leaf tensors
        module = copy.deepcopy(module)
    inputs = _inputs(torch, module, example)
    if isinstance(example, Mapping):
        if not all(isinstance(key, str) for key in example) or not (
            _takes(module.forward, **example) or _takes(module.forward, example)
        ):
            raise InputError(
                f"bad example for module {name}", got=f"a dict of {', '.join(map(str, example))}",
                expected=f"keywords of forward{inspect.signature(module.forward)}",
            )  # fmt: skip
        return TorchModule(module, inputs, tuple(example), by_keyword=True)
    if missing := _keywords(module.forward, len(inputs)):
        raise InputError(
            f"module {name} has keyword-only arguments", got=f"{plural(len(inputs), 'input')} by position",
            expected=f"a dict with {', '.join(missing)}: forward{inspect.signature(module.forward)}",
            hint=f"onchip.load(module, {{{', '.join(f'{key!r}: ..' for key in missing)}}})",
        )  # fmt: skip
    return TorchModule(module, inputs, _argument_names(module, len(inputs)), by_keyword=False)


def read_torch(source: TorchModule) -> Network:
    """Convert a module in eval mode to a network; weights keep their state_dict names. The batch is symbolic.

    Inputs are named after the forward's arguments, outputs after the keys or fields of its result. The module is
    traced; if that fails, torch's newer exporter is tried, which takes seconds.
    """
    (net,) = read_with_values(source, [{}])
    return net


def read_with_values(source: TorchModule, replaced: Sequence[Mapping[str, Array]]) -> list[Network]:
    """The network of a module that is exported once, read with each of these sets of arrays in place of the parameters
    and buffers of the same names."""
    torch, install = sys.modules["torch"], ""
    try:
        traced = _traced(torch, source)
    except InputError:
        raise
    except Exception as error:  # raised by the module's forward or by the exporter
        errors = [error]
    else:
        return [_network(source, *traced, arrays) for arrays in replaced]
    try:
        with source.called():
            outputs = _output_names(torch, source.module(*source.inputs))
            data = export_module(torch, source.module, source.inputs, _graph_names(source))
        return [_network(source, data, outputs, arrays) for arrays in replaced]
    except NoExporterError as error:
        install = f"{error}; or "
    except Exception as error:
        errors.append(error)
    got = "; ".join(dict.fromkeys(sorted(map(_reason, errors), key=len)))
    raise InputError(
        f"torch cannot trace module {source.name}", got=got,
        expected="a forward from tensors to tensors, by ONNX operators, without branches on tensor values",
        hint=FLOAT_MODEL if "quantized::" in got else
        f"{install}branch, loop and slice only by row sizes, or load the submodules one by one",
    ) from errors[0]  # fmt: skip


def _network(source: TorchModule, data: bytes, outputs: Sequence[str], replaced: Mapping[str, Array]) -> Network:
    try:
        model = parse_model(data)
        operands = {tensor.name: replaced[tensor.name] for tensor in model.graph.initializer if tensor.name in replaced}
        net = read_model(model, operands=operands).replace(name=source.name)
        return name_values(net, dict(zip(_graph_names(source), source.names, strict=True)), outputs)
    except FormatError as error:  # from the reader, which knows the node but not the module
        raise InputError(
            f"module {source.name}: {error.what}", got=error.got, expected=error.expected, hint=error.hint
        ) from None


def _reason(error: BaseException) -> str:
    """The root cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    what = str(error).strip().split("\n")[0]
    return f"{type(error).__name__.lstrip('_')}: {what}"


def unwrapped(torch: Any, module: Any) -> Any:
    """The module inside torch.compile, DataParallel or DistributedDataParallel, with the user's weight names."""
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while isinstance(module, wrappers) or "_orig_mod" in module._modules:
        module = module.module if isinstance(module, wrappers) else module._orig_mod
    return module


def _inputs(torch: Any, module: Any, example: Any) -> tuple[Any, ...]:
    device = next((weight.device for weight in module.parameters()), None)
    what = f"bad example for module {type(module).__name__}"
    if isinstance(example, Mapping):
        example = tuple(example.values())
    tensors = example if isinstance(example, tuple | list) else (example,)
    try:
        inputs = tuple(torch.as_tensor(one, device=device) for one in tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "a tensor or array, a tuple of them, or a dict of them by keyword"
        raise InputError(what, got=str(error).split("\n")[0], expected=expected) from None
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in inputs}
    if len(rows) != 1 or 0 in rows:
        got = ", ".join(str(list(tensor.shape)) for tensor in inputs) or "nothing"
        raise InputError(what, got=got, expected="the same batch size as axis 0 of every input")
    # At least two rows: tracing specialises on size 1, which may be squeezed or broadcast.
    return tuple(tensor if tensor.shape[0] > 1 else torch.cat([tensor, tensor]) for tensor in inputs)


def _tensors(torch: Any, result: Any) -> tuple[Any, ...]:
    """The tensors that a forward returns, in order; None is skipped."""
    return tuple(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _by_position(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """forward with positional tensors. `names`: its keyword arguments, or the keys of its single dict argument."""
    if not names:
        return lambda *inputs: forward(*inputs)
    if _takes(forward, **dict.fromkeys(names)):
        return lambda *inputs: forward(**dict(zip(names, inputs, strict=True)))
    return lambda *inputs: forward(dict(zip(names, inputs, strict=True)))


def _keywords(forward: Callable[..., Any], count: int) -> list[str]:
    """All argument names of a forward with required keyword-only arguments; else none."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # compiled code
        return []
    needed = [one for one in parameters if one.default is one.empty and one.kind is one.KEYWORD_ONLY]
    by_position = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    return [*by_position[:count], *(one.name for one in needed)] if needed else []


def _argument_names(module: Any, count: int) -> tuple[str, ...]:
    """The forward's names for so many arguments: tokens, mask; x, or x0, x1 .., if unknown."""
    try:
        bound = inspect.signature(module.forward).bind(*range(count))
    except (TypeError, ValueError):  # wrong count, which the forward itself rejects; or no signature
        return _numbered("x", count)
    names: list[str] = []
    for name, value in bound.arguments.items():
        names += _numbered(name, len(value)) if isinstance(value, tuple) else [name]
    return tuple(names)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}{i}" for i in range(count))


def _output_names(torch: Any, result: Any, name: str = "") -> list[str]:
    """A name for every returned tensor: keys and fields if it has them, else output0, output1 .."""
    if isinstance(result, torch.Tensor):
        return [name or "output"]
    path = f"{name}." if name else ""
    items: list[tuple[str, Any]] = []
    if isinstance(result, Mapping):
        items = [(f"{path}{key}", item) for key, item in result.items()]
    elif isinstance(result, tuple) and hasattr(result, "__match_args__"):  # a NamedTuple, or one of torch's own types
        items = [(f"{path}{key}", item) for key, item in zip(result.__match_args__, result, strict=True)]
    elif isinstance(result, tuple | list):
        items = [(f"{path or 'output'}{i}", item) for i, item in enumerate(result)]
    return [leaf for key, item in items for leaf in _output_names(torch, item, key)]


def _graph_names(source: TorchModule, outputs: Sequence[str] = ()) -> list[str]:
    """Names of inputs and then outputs in the graph, which has one namespace: weights keep theirs."""
    taken = set(source.module.state_dict())
    names: list[str] = []
    for name in (*source.names, *outputs):
        names.append(free_name(name, taken))
        taken.add(names[-1])
    return names


def _takes(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _traced(torch: Any, source: TorchModule) -> tuple[bytes, list[str]]:
    """Export the module to ONNX with torch's tracing exporter; also return the output names."""
    module, inputs = source.module, source.inputs
    with _standard_forwards(torch, module), plain_functions(torch), _more_operators(torch), source.called():
        data, outputs, trace_warnings = _trace(torch, source, inputs)
        if copied := next((text for text in trace_warnings.values() if "NumPy" in text or "list" in text), ""):
            raise _DataDependentError(copied)
        if trace_warnings and (read := _value_read(torch, module, inputs, trace_warnings)):
            raise _DataDependentError(read)
        if trace_warnings and _trace(torch, source, tuple(torch.cat([x, x[:1]]) for x in inputs))[0] != data:
            raise _DataDependentError(f"{next(iter(trace_warnings.values()))} (depends on the batch size)")
    return data, outputs


class _DataDependentError(Exception):
    """A branch, a loop or a constant depends on tensor values: tracing would freeze the example's."""


def _trace(torch: Any, source: TorchModule, inputs: tuple[Any, ...]) -> tuple[bytes, list[str], TraceWarnings]:
    """The module as ONNX, its output names, and torch's warnings about Python values taken from tensors or sizes."""
    file = io.BytesIO()
    with _quiet(torch) as caught:
        result = source.module(*inputs)
        odd = [
            leaf for leaf in torch.utils._pytree.tree_leaves(result) if not isinstance(leaf, (torch.Tensor, type(None)))
        ]
        if odd:
            raise InputError(
                f"module {source.name} returns a non-tensor", got=f"{type(odd[0]).__name__} {odd[0]!r:.80}",
                expected="tensors; None is ignored", hint="a forward that returns only tensors",
            )  # fmt: skip
        outputs = _output_names(torch, result)
        names = _graph_names(source, outputs)
        torch.onnx.export(
            source.module, inputs, file, input_names=names[: len(inputs)], output_names=names[len(inputs) :],
            opset_version=OPSET, dynamo=False, dynamic_axes={value: {0: "B"} for value in names},
            # Constant folding would fold batch norms into convolutions and lose weight names. The planner folds later.
            do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
        )  # fmt: skip
    ours = [warning for warning in caught if _is_users(torch, warning)]
    found: TraceWarnings = {(one.filename, one.lineno): str(one.message).strip().split(". ")[0] for one in ours}
    return file.getvalue(), outputs, found


def _is_users(torch: Any, warning: warnings.WarningMessage) -> bool:
    """Whether a warning concerns the user's code: torch's own modules cause some too."""
    is_torchs = Path(warning.filename).is_relative_to(Path(torch.__file__).parent)
    return issubclass(warning.category, torch.jit.TracerWarning) and not is_torchs


def _value_read(torch: Any, module: Any, inputs: tuple[Any, ...], trace_warnings: TraceWarnings) -> str:
    """The first line with a warning at which the forward reads a tensor's value; "" if there is none.

    The module runs untraced, where sizes are plain ints. If no value is read, all warnings were about sizes, and those
    of a row are constants. A line without a warning was not traced: the module guards it.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                stack = [one for one in traceback.extract_stack() if one.filename != __file__]
                stack = [one for one in stack if not one.filename.endswith(_BETWEEN)]
                file, line = stack[-1].filename, stack[-1].lineno
                if (file, line) in trace_warnings:
                    found.append(f"{trace_warnings[file, line]} ({Path(file).name}, line {line})")
            return function(*args, **(kwargs or {}))

    with warnings.catch_warnings(), Watch():
        warnings.simplefilter("ignore")
        module(*inputs)
    return found[0] if found else ""


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Eval mode; restores every submodule's mode and the values of its buffers."""
    modes = [(layer, layer.training) for layer in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    module.eval()
    try:
        yield
    finally:
        for buffer, values in buffers:
            buffer.copy_(values)
        for layer, mode in modes:
            layer.training = mode


@contextlib.contextmanager
def _as_written(torch: Any) -> Iterator[None]:
    """Disable torch.compile: its code cannot be traced and takes a minute to compile for a few rows."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _standard_forwards(torch: Any, module: Any) -> Iterator[None]:
    """Replace the fast paths of torch modules, which export badly, by standard operations.

    An EmbeddingBag over rows of ids is an Embedding and a mean, not a loop over bags; attention keeps the batch first;
    an RMSNorm, which the exporter lacks, is its formula.
    """
    forwards: dict[Any, Callable[..., Any]] = {
        torch.nn.EmbeddingBag: _bag_forward, torch.nn.MultiheadAttention: _attention_forward,
        torch.nn.RMSNorm: _rms_norm_forward,
    }  # fmt: skip
    replaced = [(layer, forwards[type(layer)]) for layer in module.modules() if type(layer) in forwards]
    fast = torch.backends.mha.get_fastpath_enabled()
    for layer, forward in replaced:
        layer.forward = functools.partial(forward, torch, layer)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for layer, _ in replaced:
            del layer.forward


@contextlib.contextmanager
def _more_operators(torch: Any) -> Iterator[None]:
    """Register operators that the exporter lacks or drops although ONNX has them."""

    def dropout(graph: Any, x: Any, p: Any, is_training: Any) -> Any:
        return graph.op("Dropout", x, graph.op("Cast", p, to_i=1), is_training)

    symbolics = {"aten::mT": _transposed_matrices, "aten::dropout": dropout, "aten::feature_dropout": dropout}
    for name, symbolic in symbolics.items():
        torch.onnx.register_custom_op_symbolic(name, symbolic, OPSET)
    try:
        yield
    finally:
        for name in symbolics:
            torch.onnx.unregister_custom_op_symbolic(name, OPSET)


def _transposed_matrices(graph: Any, x: Any) -> Any:
    rank = x.type().dim()
    return graph.op("Transpose", x, perm_i=[*range(rank - 2), rank - 1, rank - 2])


def _bag_forward(torch: Any, bag: Any, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
    if input.ndim != 2 or per_sample_weights is not None or bag.padding_idx is not None or bag.max_norm is not None:
        return type(bag).forward(bag, input, offsets, per_sample_weights)
    rows = torch.nn.functional.embedding(input, bag.weight)
    return rows.amax(dim=1) if bag.mode == "max" else getattr(rows, bag.mode)(dim=1)


def _rms_norm_forward(torch: Any, norm: Any, x: Any) -> Any:
    axes = tuple(range(-len(norm.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    y = x * torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + eps)
    return y if norm.weight is None else y * norm.weight


def _attention_forward(torch: Any, attention: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
    mask = options.get("attn_mask")
    is_masked = options.get("key_padding_mask") is not None or (mask is not None and mask.ndim != 2)
    adds = attention.bias_k is not None or attention.add_zero_attn or not attention._qkv_same_embed_dim
    if not attention.batch_first or query.ndim != 3 or more or is_masked or adds:
        return type(attention).forward(attention, query, key, value, *more, **options)
    E, heads = attention.embed_dim, attention.num_heads
    weight, bias = attention.in_proj_weight, attention.in_proj_bias

    def projected(x: Any, first: int) -> Any:
        rows = slice(first, first + E)
        y = torch.nn.functional.linear(x, weight[rows], None if bias is None else bias[rows])
        return y.unflatten(-1, (heads, E // heads)).transpose(1, 2)

    q, k, v = projected(query, 0), projected(key, E), projected(value, 2 * E)
    scores = q @ k.transpose(2, 3) * (E // heads) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1)
    y = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    if not options.get("need_weights", True):
        return y, None
    return y, weights.mean(dim=1) if options.get("average_attn_weights", True) else weights


@contextlib.contextmanager
def _quiet(torch: Any) -> Iterator[list[warnings.WarningMessage]]:
    """Silence the exporter's log and the graph it prints on failure; yield the warnings."""
    logger = logging.getLogger("torch.onnx")
    level, log, enable = logger.level, torch._C._jit_onnx_log, torch._C._jit_set_onnx_log_enabled
    is_on = torch._C._jit_is_onnx_log_enabled()
    logger.setLevel(logging.ERROR)
    enable(False)
    # The exporter re-enables its log, and some messages come from C++.
    torch._C._jit_onnx_log = torch._C._jit_set_onnx_log_enabled = lambda *_: None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        torch._C._jit_onnx_log, torch._C._jit_set_onnx_log_enabled = log, enable
        enable(is_on)
        logger.setLevel(level)
