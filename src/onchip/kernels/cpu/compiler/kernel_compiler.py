"""The compiler of the CPU's kernels: Numba's own, but for two things.

Width    For chips that clock down while they work on 512-bit vectors LLVM takes 256 bits by itself. The register tile
         (tile.py) clocks them down anyway, so the loops around it should be as wide: tanh and the like take two thirds
         of the time.
Swallow  What other kernels swallow Numba would optimise and emit by itself as well, for nobody: a third of the time.
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

# Of kernels: they have loops, no closures and no arithmetic of whole arrays.
_NOT_NEEDED = InlineClosureLikes, NopythonRewrites
_REFUSE = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value
_FULL_WIDTH = f'"prefer-vector-width"="{VECTOR_BYTES * 8}"'


class _Lower(Lower):  # type: ignore[misc]
    def setup_function(self, fndesc: Any) -> None:
        super().setup_function(fndesc)
        set.add(self.function.attributes, _FULL_WIDTH)  # llvmlite's own `add` knows no attribute with a value


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
    """Optimised as a whole. Not function by function before that, but where users of arrays are counted: most of the
    counting goes then, and else nothing does that does not go later."""

    def __init__(self, codegen: Any, name: str, is_counting: bool) -> None:
        super().__init__(codegen, name)
        self._is_counting = is_counting

    def _optimize_functions(self, ll_module: Any) -> None:
        if self._is_counting:
            super()._optimize_functions(ll_module)
        else:
            ll_module.data_layout = self._codegen._data_layout


@register_pass(mutates_CFG=True, analysis_only=False)
class _SwallowedLowering(_Lowering):
    _name = "onchip_swallowed_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _SwallowedLibrary(state.targetctx.codegen(), state.func_id.func_qualname, state.flags.nrt)
        state.flags.no_compile = True
        super().run_pass(state)
        made = state.cr
        # Numba knows a compiled function by what Python would call.
        called = _dynfunc.make_function(
            made.fndesc.lookup_module(), made.fndesc.qualname, "", _REFUSE, made.env, (state.library,)
        )
        state.targetctx.insert_user_function(called, made.fndesc, [state.library])
        state.cr = made._replace(cfunc=called)
        return True


class _SwallowedLibrary(_Library):
    """LLVM's code of a function: optimised and emitted with the functions that swallow it."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True


class KernelCompiler(CompilerBase):  # type: ignore[misc]
    """Of what is called from outside: a function with all that it swallows."""

    lowering: type[NativeLowering] = _Lowering

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [
            (self.lowering if each is NativeLowering else each, told)
            for each, told in manager.passes
            if each not in _NOT_NEEDED
        ]
        manager.finalize()
        return [manager]


class InlinedCompiler(KernelCompiler):
    """Of what is only called by other compiled functions, and becomes a part of each."""

    lowering = _SwallowedLowering
