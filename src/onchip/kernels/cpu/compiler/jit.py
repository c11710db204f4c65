"""How the CPU kernels are compiled: Numba, cached on disk, never stale.

Numba's own cache looks only at the file a function stands in, so an edit to a helper in another file goes
unseen; and it unpickles whatever it finds. Here the key has a digest of all sources, and entries are checked. What
takes numbers only is kept as machine code, which needs no Numba (`compiler/machine_code.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from onchip.cache import private_folder
from onchip.kernels.cpu.compiler.compile_ahead import (
    announced,
    lock_function,
    make_together,
    start_helper,
    unlock_function,
)  # fmt: skip
from onchip.kernels.cpu.compiler.late_numba import LateFunction, TypeName, cgutils, intrinsic, types
from onchip.kernels.cpu.compiler.machine_code import keep_code, load_code, python_function, versions
from onchip.kernels.cpu.compiler.notice import notice
from onchip.kernels.vectors import HAS_FMA

F = TypeVar("F", bound=Callable[..., Any])

ALL = 1 << 40  # the length of an array whose end nobody asks for


@functools.cache
def _source_digest(folder: Path, pattern: str = "*.py") -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def cache_folder() -> Path | None:
    return private_folder("numba")


def key_of(function: Callable[..., Any], signature: str) -> str:
    """What a compiled function is kept under: all that its code depends on."""
    code, kernels = function.__code__, Path(__file__).parents[1]
    own, shared = Path(code.co_filename).parent, kernels.parent
    sources = [_source_digest(kernels, "**/*.py"), _source_digest(shared), _source_digest(own)]
    name = (function.__module__, function.__qualname__, code.co_firstlineno)
    closure = [_lasting(cell.cell_contents) for cell in function.__closure__ or ()]
    return hashlib.sha256(repr((sources, versions(), name, signature, closure)).encode()).hexdigest()


def _lasting(value: Any) -> Any:
    """The same in every process. A function, whose source is digested, is its name."""
    if isinstance(value, CompiledFunction | LinkedFunction | LateFunction):
        return value.__module__, value.__qualname__
    if value is None or isinstance(value, int | float | str | np.generic):
        return value
    if isinstance(value, tuple | list):
        return [_lasting(each) for each in value]
    from numba.core.serialize import dumps

    return dumps(value)


class CompiledFunction:
    """A function that is compiled for the types of each call of it. Compiled code swallows it; Python calls another."""

    def __init__(self, function: Callable[..., Any], is_inline: bool) -> None:
        functools.update_wrapper(self, function)
        self.py_func, self.is_inline = function, is_inline

    @functools.cached_property
    def dispatcher(self) -> Any:
        from onchip.kernels.cpu.compiler.numba_cache import inlined

        return inlined(self.py_func, self.is_inline)

    @functools.cached_property
    def _called(self) -> Any:
        from onchip.kernels.cpu.compiler.numba_cache import called

        return called(self.py_func)

    def __call__(self, *args: Any) -> Any:
        return self._called(*args)

    def __getattr__(self, name: str) -> Any:
        """For Numba, which takes it for the dispatcher."""
        return getattr(self.dispatcher, name)


def compiled(*, inline: bool = False) -> Callable[[F], F]:
    """Decorate a function: nopython, no GIL, IEEE arithmetic (no reordering, no contraction), cached on disk.

    inline  LLVM puts it into its callers whatever its size, so that loops over it become vector code
    """

    def decorate(function: F) -> F:
        return CompiledFunction(function, inline)  # type: ignore[return-value]

    return decorate


class LinkedFunction(LateFunction):
    """A function of numbers that is compiled by itself, once, when it is first asked for."""

    def __init__(self, function: Callable[..., Any], argument_types: tuple[Any, ...], writes: Any = None) -> None:
        super().__init__(self._make_call, function.__name__)
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self.function, self.argument_types, self.writes = function, argument_types, writes
        self.symbol = f"onchip_{function.__module__}_{function.__name__}".replace(".", "_")
        self.address: int | None = None
        _BY_SYMBOL[self.symbol] = self

    def link(self) -> int:
        """Where its code lies; from now on kernels that call it can be loaded."""
        if not self.is_there():
            make_needed(self)
        assert self.address is not None
        return self.address

    def is_there(self) -> bool:
        """Compiled by this process, or loaded now."""
        if self.address is None:
            self._found(load_code(cache_folder(), self.key, _find))
        return self.address is not None

    def try_make(self, is_alone: bool) -> bool:
        """Load it; or compile it, if all that it needs is there and no other process is at it, or `is_alone`."""
        if self.is_there():
            return True
        folder = cache_folder()
        if not all(made.is_there() for made in self.below) or not (lock_function(folder, self.key) or is_alone):
            return False
        try:
            if not self.is_there():  # another process may have made it meanwhile
                self._compile(folder)
        finally:
            unlock_function(folder, self.key)
        return True

    @functools.cached_property
    def key(self) -> str:
        return key_of(self.function, f"{', '.join(_names(self.argument_types))} -> {self.writes}")

    @functools.cached_property
    def below(self) -> list[LinkedFunction]:
        """The linked functions that it needs."""
        return linked_below(self)[:-1]

    @functools.cached_property
    def size(self) -> int:
        """In bytes of Python's code, with all that it swallows: the longer, the longer it takes to compile."""
        return _size(self.function)

    def _found(self, address: int | None) -> None:
        if address is not None:
            self.address = address
            llvm.add_symbol(self.symbol, address)  # found by name, so kernels can be cached

    def _compile(self, folder: Path | None) -> None:
        from onchip.kernels.cpu.compiler.numba_cache import compile_linked

        takes, writes = map(_real, self.argument_types), _real(self.writes or types.void)
        with compiling_now(self.function):
            made = compile_linked(self.function, tuple(takes), writes)
        _KEPT.append(made)
        self._found(made.address)
        if made.code:
            keep_code(folder, self.key, made.name, made.needs, made.code)

    def _make_call(self) -> Any:
        """What compiled code calls it by."""
        signature, function = _real(types.void)(*map(_real, self.argument_types)), self.function

        def call(typing_context: Any, *args: Any) -> Any:
            self.link()

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                kinds = [context.get_value_type(kind) for kind in signature.args]
                kind = ir.FunctionType(ir.VoidType(), kinds)
                builder.call(cgutils.get_or_insert_function(builder.module, kind, self.symbol), args)
                return context.get_dummy_value()

            return signature, codegen

        call.__name__ = function.__name__
        call.__signature__ = _signature(function.__code__.co_varnames[: len(self.argument_types)])  # type: ignore[attr-defined]
        return importlib.import_module("numba.extending").intrinsic(call)


def _signature(names: Iterable[str]) -> inspect.Signature:
    """What Numba asks of an intrinsic whose arguments Python sees as one tuple."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ("context", *names)])


compiling: list[Callable[..., Any]] = []  # the function that is, and those that need it


@contextlib.contextmanager
def compiling_now(function: Callable[..., Any]) -> Iterator[None]:
    depth = len(compiling)
    compiling.append(function)
    try:
        yield
    finally:
        del compiling[depth:]


def make_needed(function: Any) -> None:
    """Compile what a function needs, itself if it is linked, and what will be asked for soon. With a second process."""
    soon = [] if compiling else announced()  # a kernel that is being compiled waits for its own only
    missing = [made for made in all_linked_below([function, *soon]) if not made.is_there()]
    is_linked = isinstance(function, LinkedFunction)
    count = len(missing) + (not is_linked)
    notice.expect(count, start_helper(function.function if is_linked else function, cache_folder(), count))
    from onchip.kernels.cpu.compiler.numba_cache import global_compiler_lock  # now: loading Numba takes a while

    with global_compiler_lock:
        make_together(missing)


_BY_SYMBOL: dict[str, LinkedFunction] = {}
_KEPT: list[Any] = []  # their code lives as long as they do
_OBJECT_BYTES = object.__basicsize__


def _names(kinds: Sequence[Any]) -> list[str]:
    """The same whether Numba was loaded when they were named, or not."""
    return ["bool" if str(kind) == "boolean" else str(kind) for kind in kinds]


def _real(kind: Any) -> Any:
    return kind.real() if isinstance(kind, TypeName) else kind


def _find(symbols: Sequence[str]) -> bool:
    """Load the linked functions that code needs; whether all that it needs is there then."""
    if not all(_BY_SYMBOL[symbol].is_there() for symbol in symbols if symbol in _BY_SYMBOL):
        return False
    missing = [symbol for symbol in symbols if llvm.address_of_symbol(symbol) is None]
    if missing:  # of Numba's own
        importlib.import_module("numba.core.registry").cpu_target.target_context.refresh()
        return all(llvm.address_of_symbol(symbol) is not None for symbol in missing)
    return True


def linked(*argument_types: Any) -> Callable[[F], F]:
    """Decorate a function that is compiled by itself, once, and that kernels call by its symbol.

    A kernel swallows the code of every `compiled` function it calls, as do those that call it, and all of it is
    optimised again each time: conv_fused took 34 s to compile that way. A linked function takes numbers only (an array
    is passed as its address: `floats_at`), returns nothing and raises nothing. It is compiled, or loaded, for the first
    kernel that calls it by its name; or for who asks for its address (`address_of`).
    """

    def decorate(function: F) -> F:
        return LinkedFunction(function, argument_types)  # type: ignore[return-value]

    return decorate


def address_of(function: Any) -> int:
    """Where the code of a linked function lies."""
    return function.link()  # type: ignore[no-any-return]


class EntryFunction(LinkedFunction):
    """A function of ints that gives an int, for Python to call."""

    @functools.cached_property
    def load(self) -> Callable[..., int]:
        """The same as a built-in function, quicker to call."""
        return python_function(self.__name__, self.link(), len(self.argument_types), cache_folder())

    def __call__(self, *numbers: int) -> int:
        return self.load(*numbers)


def entry(function: Callable[..., int]) -> EntryFunction:
    """Decorate a function of ints that Python calls, compiled by itself, once; the GIL is others' meanwhile."""
    count = function.__code__.co_argcount
    return EntryFunction(function, (types.int64,) * count, types.int64)


def linked_below(function: Any) -> list[LinkedFunction]:
    """The linked functions that one needs, itself if it is one; each once, behind those that it needs."""
    plain = function.function if isinstance(function, LinkedFunction) else getattr(function, "py_func", function)
    found = {inner: None for called in _called(plain) for inner in linked_below(called)}
    return [*found, function] if isinstance(function, LinkedFunction) else list(found)


def all_linked_below(functions: Sequence[Any]) -> list[LinkedFunction]:
    return list({made: None for function in functions for made in linked_below(function)})


def _size(function: Callable[..., Any]) -> int:
    inlined = (called for called in _called(function) if not isinstance(called, LinkedFunction))
    return len(function.__code__.co_code) + sum(map(_size, inlined))


def _called(function: Callable[..., Any]) -> Iterator[LinkedFunction | Callable[..., Any]]:
    """The linked functions and the `compiled` ones that a function calls. They are called by global names; nobody
    calls them as attributes of a module."""
    names, cells = function.__code__.co_names, function.__closure__ or ()
    for called in (*map(function.__globals__.get, names), *(cell.cell_contents for cell in cells)):
        if isinstance(called, LinkedFunction):
            yield called
        elif isinstance(called, CompiledFunction):
            yield called.py_func
        elif isinstance(called, LateFunction) and called.needs is not None:
            yield called.needs


def code_call(count: int) -> Any:
    """A function for compiled code: that calls what lies at an address, its first argument, with `count` ints."""

    def call(typing_context: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
            builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
            return context.get_dummy_value()

        return types.void(*(types.int64,) * (count + 1)), codegen

    call.__signature__ = _signature(["code", *(f"given_{i}" for i in range(count))])  # type: ignore[attr-defined]
    return intrinsic(call)


# Arrays at addresses are put together in LLVM: functions of Python Numba would copy, and type anew, at each place that
# names one.


def build_array(context: Any, builder: Any, kind: Any, where: Any, shape: Sequence[Any]) -> Any:
    """In LLVM: the array of Numba's type `kind` at an address."""
    array, step = context.make_array(kind)(context, builder), ir.IntType(64)(kind.dtype.bitwidth // 8)
    strides = [step]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    importlib.import_module("numba.np.arrayobj").populate_array(
        array, builder.inttoptr(where, array.data.type), shape, strides, itemsize=step, meminfo=None
    )
    return array._getvalue()


def array_at(number: Any) -> tuple[Any, Callable[..., Any]]:
    """What an intrinsic gives: the array of such numbers of an address and a count."""
    kind = types.Array(number, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return build_array(context, builder, kind, args[0], args[1:])

    return kind(types.int64, types.int64), codegen


@intrinsic
def floats_at(typing_context: Any, where: Any, count: Any) -> Any:
    """The float32 array of `count` numbers at an address."""
    return array_at(types.float32)


@intrinsic
def doubles_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.float64)


@intrinsic
def ints_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.int64)


@intrinsic
def bytes_at(typing_context: Any, where: Any, count: Any) -> Any:
    return array_at(types.uint8)


@intrinsic
def int_at(typing_context: Any, where: Any) -> Any:
    """The 64-bit integer at an address: quicker to compile than an array of one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def int32_at(typing_context: Any, where: Any) -> Any:
    """The 32-bit integer at an address, as one of 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer())), ir.IntType(64))

    return types.int64(types.int64), codegen


class _Address(CompiledFunction):
    def __call__(self, array: Any) -> int:
        """From Python: array.ctypes.data takes three times as long."""
        return ctypes.c_int64.from_address(id(array) + _OBJECT_BYTES).value


def _data(array: Any) -> int:
    """Where an array begins. Signed, as all address arithmetic here: Numba turns a mix of signs into floats."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


address = _Address(_data, is_inline=True)


@compiled(inline=True)
def data_of(array: int) -> int:
    """Where an array begins, of its `id` in Python: the quickest way from there, whatever its type.

    It is the first field behind an object's own (PyArrayObject). The caller keeps the array.
    """
    return int_at(array + _OBJECT_BYTES)  # type: ignore[no-any-return]


@intrinsic
def multiply_add(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32, rounded once where the machine can; loops of it become vector code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_FMA:
            return builder.fadd(builder.fmul(args[0], args[1]), args[2])
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args)

    return types.float32(*(types.float32,) * 3), codegen


@intrinsic
def prefetch(typing_context: Any, where: Any) -> Any:
    """Ask for the cache line at an address; nobody waits for it, and a wrong address does no harm."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *(ir.IntType(32),) * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, keep, data = (ir.IntType(32)(number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
