"""Triton's interpreter, faster: modules are prepared once per launch, and joint sums taken one by one."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def prepare_once(interpreter: Any) -> None:
    """Let ``triton.runtime.interpreter`` patch ``triton.language`` once per launch, not in each call of a helper.

    A launch replaces the builtins of the language and puts them back at its end. Every helper that a kernel calls does
    the first half again: it lists hundreds of members to find that all of them are replaced already.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton
        return
    patch, launch, language = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter.tl
    patched: set[str] = set()  # in the launch that is running

    @functools.cache
    def used_by(fn: Callable[..., Any]) -> frozenset[str]:
        modules = {value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value)}
        return frozenset(modules & {language.__name__, language.core.__name__})

    def patch_new(fn: Callable[..., Any]) -> Any:
        if used_by(fn) <= patched:
            return interpreter._LangPatchScope()
        patched.update(used_by(fn))
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_anew


def sum_one_by_one(interpreter: Any, sums: Iterable[Any]) -> None:
    """Let the interpreter take the joint reductions whose combine functions are ``sums`` by numpy.

    It walks any other joint reduction element by element in Python.
    """
    apply, known = interpreter.ReduceOps.apply_impl, list(sums)

    def apply_impl(self: Any, input: tuple[Any, ...]) -> Any:
        if self.combine_fn in known:
            return [self.sum(part) for part in input]
        return apply(self, input)

    interpreter.ReduceOps.apply_impl = apply_impl
