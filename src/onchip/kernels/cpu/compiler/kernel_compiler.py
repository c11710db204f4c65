"""The compiler of the CPU's kernels: Numba's, with two changes.

Width   On CPUs that reduce their clock for 512-bit vectors, LLVM prefers 256 bits. The register tile (tile.py) reduces
        the clock anyway, so all other loops use full vectors, too: tanh and the like take a third less time. A function
        needs the attribute, and so does one that it is inlined into.
Inline  Numba would also optimise and emit inlined functions separately: a third of the compile time, for unused code.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering, NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes

from onchip.kernels.vectors import VECTOR_BYTES

# Kernels have loops, but neither closures nor arithmetic on whole arrays.
_UNUSED_PASSES = InlineClosureLikes, NopythonRewrites
_NOT_CALLABLE = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value
FULL_WIDTH = f'"prefer-vector-width"="{VECTOR_BYTES * 8}"'


class _Lower(Lower):  # type: ignore[misc]
    def setup_function(self, fndesc: Any) -> None:
        super().setup_function(fndesc)
        set.add(self.function.attributes, FULL_WIDTH)  # llvmlite's own `add` rejects an attribute with a value


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]
    _name = "onchip_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return _Lower

    def run_pass(self, state: Any) -> bool:
        if state.library is None:
            state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname, state.flags.nrt)
            state.library.enable_object_caching()
        super().run_pass(state)
        return True


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Skips the passes that optimise each function first, unless arrays are reference-counted: there they remove most
    of the counting. The passes over the whole module repeat all else they do."""

    def __init__(self, codegen: Any, name: str, is_counting: bool) -> None:
        super().__init__(codegen, name)
        self._is_counting = is_counting

    def _optimize_functions(self, ll_module: Any) -> None:
        if self._is_counting:
            super()._optimize_functions(ll_module)
        else:
            ll_module.data_layout = self._codegen._data_layout


@register_pass(mutates_CFG=True, analysis_only=False)
class _InlinedLowering(_Lowering):
    _name = "onchip_inlined_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _InlinedLibrary(state.targetctx.codegen(), state.func_id.func_qualname, state.flags.nrt)
        state.flags.no_compile = True
        super().run_pass(state)
        result = state.cr
        # Numba identifies a compiled function by its Python callable.
        called = _dynfunc.make_function(
            result.fndesc.lookup_module(), result.fndesc.qualname, "", _NOT_CALLABLE, result.env, (state.library,)
        )
        state.targetctx.insert_user_function(called, result.fndesc, [state.library])
        state.cr = result._replace(cfunc=called)
        return True


class _InlinedLibrary(_Library):
    """The LLVM IR of a function, optimised and emitted with the functions that inline it."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True


class KernelCompiler(CompilerBase):  # type: ignore[misc]
    """For functions called from Python or by address: compiled together with all functions they inline."""

    lowering: type[NativeLowering] = _Lowering

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [
            (self.lowering if each is NativeLowering else each, options)
            for each, options in manager.passes
            if each not in _UNUSED_PASSES
        ]
        manager.finalize()
        return [manager]


class InlinedCompiler(KernelCompiler):
    """For functions that other compiled functions inline."""

    lowering = _InlinedLowering
