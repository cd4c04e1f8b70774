"""What the tests change in Triton's interpreter, on a stand-in for it."""

import types
from types import SimpleNamespace

from interpreting import prepare_once, sum_one_by_one


def test_the_language_is_patched_once_per_launch():
    language = types.ModuleType("triton.language")
    language.core = types.ModuleType("triton.language.core")  # type: ignore[attr-defined]
    kernel, helper, of_core = (
        types.FunctionType((lambda: None).__code__, {"tl": module})
        for module in (language, language, language.core)
    )  # fmt: skip
    patched = []

    class GridExecutor:
        def __call__(self):
            for fn in (kernel, helper, helper, of_core, of_core):
                interpreter._patch_lang(fn)

    interpreter = SimpleNamespace(
        _patch_lang=patched.append, _LangPatchScope=object, GridExecutor=GridExecutor, tl=language
    )
    prepare_once(interpreter)
    for launches in (1, 2):
        GridExecutor()()
        assert patched == [kernel, of_core] * launches
    prepare_once(SimpleNamespace())  # another version of Triton


def test_joint_sums_are_taken_one_by_one():
    class ReduceOps:
        combine_fn = "add"
        sum = staticmethod(sum)

        def apply_impl(self, input):
            return "element by element"

    sum_one_by_one(SimpleNamespace(ReduceOps=ReduceOps), ["add"])
    reduction = ReduceOps()
    assert reduction.apply_impl(((1, 2), (3, 4))) == [3, 7]
    reduction.combine_fn = "max"
    assert reduction.apply_impl(((1, 2), (3, 4))) == "element by element"
