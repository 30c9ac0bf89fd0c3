"""A target that is imported in the middle of other work: its probe runs as in a new process, and leaves no trace."""

from __future__ import annotations

import pytest

from tests.marks import rest_is_long

from .harness import CORE, PATCH

PROBE = """
import torch

def broken(module):
    layer = torch.nn.Linear(4, 4)
    new = layer(torch.rand(1, 4))
    assert new.device.type == "cpu" and new.dtype is torch.float32 and new.requires_grad
    assert not new.is_inference() and new.tolist()
    return module.f() == "broken"
"""

SURROUNDINGS = {
    "in a new process": "contextlib.nullcontext()",
    "while a model is made on meta": "torch.device('meta')",
    "in inference mode": "torch.inference_mode()",
    "without gradients": "torch.no_grad()",
    "with another default dtype": "in_bfloat16()",
    "with hooks of saved tensors": "torch.autograd.graph.saved_tensors_hooks(called, called)",
    "without hooks of saved tensors": "torch.autograd.graph.disable_saved_tensors_hooks('not now')",
    "with hooks of saved tensors that may not be added to": "only_these_hooks()",
    "while a model is made without weights": "no_weights()",
}
OFTEN = ("in a new process", "while a model is made without weights")


@pytest.mark.parametrize("surroundings", rest_is_long(SURROUNDINGS, *OFTEN))
def test_a_target_is_imported(world, surroundings) -> None:
    pytest.importorskip("torch")
    world.library()
    world.fix(body=PROBE + PATCH)
    outcome = world.run(f"""
        import contextlib, torch, diffusers_quantfix
        @contextlib.contextmanager
        def in_bfloat16():
            torch.set_default_dtype(torch.bfloat16)
            yield
        @contextlib.contextmanager
        def no_weights():
            "As accelerate.init_empty_weights, for all threads."
            old = torch.nn.Module.register_parameter
            def register_empty(module, name, parameter):
                old(module, name, parameter)
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(parameter.to(torch.device("meta")))
            torch.nn.Module.register_parameter = register_empty
            try:
                yield
                assert torch.nn.Linear(1, 1).weight.is_meta
            finally:
                torch.nn.Module.register_parameter = old
        @contextlib.contextmanager
        def only_these_hooks():
            engine = torch._C._autograd
            with torch.autograd.graph.saved_tensors_hooks(called, called):
                engine._saved_tensors_hooks_disable("not now", False)
                yield
                assert engine._saved_tensors_hooks_get_disabled_error_message() == "not now"
                assert engine._top_saved_tensors_default_hooks(True) == (called, called)
                engine._saved_tensors_hooks_enable()
        seen = []
        def called(tensor):
            seen.append(tensor)
            return tensor
        torch.manual_seed(0)
        with {SURROUNDINGS[surroundings]}:
            def now():
                new = torch.zeros(1)
                return [str(new.device), str(new.dtype), new.is_inference(), torch.is_grad_enabled()]
            before = now()
            import lib.core
            after = now()
        drawn = torch.rand(2, dtype=torch.float32).tolist()
        torch.manual_seed(0)
        assert not seen, "the program's hooks were called"
        tell(state=states("fix-f"), reason=reason("fix-f"), same=before == after,
             seed=drawn == torch.rand(2, dtype=torch.float32).tolist())
    """)
    assert outcome["state"] == "applied", outcome["reason"]
    assert outcome["same"] and outcome["seed"]


WITHOUT_WEIGHTS = """
    import torch, diffusers_quantfix
    old = torch.nn.Module.register_parameter
    torch.nn.Module.register_parameter = lambda module, name, parameter: old(module, name, None)
    import lib.core
    first = [states("fix-f"), reason("fix-f")]
    torch.nn.Module.register_parameter = old
    tell(first=first, state=diffusers_quantfix.status().to_dict()["fixes"][0]["state"], f=lib.core.f())
"""


def test_an_answer_that_may_be_wrong_is_not_final(world) -> None:
    """Another thread makes models without weights, in a way of its own."""
    pytest.importorskip("torch")
    world.library()
    world.fix(body=PROBE + PATCH)
    outcome = world.run(WITHOUT_WEIGHTS)
    assert outcome["first"] == [
        "waiting",
        "cannot be decided while models are made without weights; apply() or the next target asks again",
    ]
    assert (outcome["state"], outcome["f"]) == ("applied", "patched")


HOOKED = """
    import torch, diffusers_quantfix
    from torch.nn.modules.module import register_module_{kind}_hook
    def refuses(*given):
        raise ValueError("not my layer")
    hook = register_module_{kind}_hook(refuses)
    import lib.core
    first = [states("fix-f"), reason("fix-f")]
    hook.remove()
    tell(first=first, state=diffusers_quantfix.status().to_dict()["fixes"][0]["state"], f=lib.core.f())
"""


@pytest.mark.parametrize(
    "kind", rest_is_long(["forward_pre", "forward", "parameter_registration"], "forward_pre")
)
def test_a_hook_on_all_modules_that_refuses_those_of_a_probe(world, kind) -> None:
    """The fix was off for the rest of the process."""
    pytest.importorskip("torch")
    world.library()
    world.fix(body=PROBE + PATCH)
    outcome = world.run(HOOKED.format(kind=kind))
    assert outcome["first"] == [
        "waiting",
        "cannot be decided while the program has hooks on all modules; apply() or the next target asks again",
    ]
    assert (outcome["state"], outcome["f"]) == ("applied", "patched")
    assert "was not installed" not in outcome.err


SWAPPING = """
def broken(module):
    import torch
    torch.__future__.is_known
    return module.f() == "broken"
"""


def test_a_probe_that_fails_while_torch_swaps_parameters(world) -> None:
    """It said on standard error that the fix was not installed, and the fix was off for the rest of the process."""
    pytest.importorskip("torch")
    world.library()
    world.fix(body=SWAPPING + PATCH)
    outcome = world.run("""
        import torch, diffusers_quantfix
        torch.__future__.set_swap_module_params_on_conversion(True)
        import lib.core
        first = reason("fix-f")
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.__future__.is_known = True
        tell(first=first, state=diffusers_quantfix.status().to_dict()["fixes"][0]["state"], f=lib.core.f())
    """)
    assert outcome["first"] == (
        "cannot be decided while torch swaps parameters in Module.to(); apply() or the next target asks again"
    )
    assert (outcome["state"], outcome["f"]) == ("applied", "patched")
    assert "was not installed" not in outcome.err


TRANSFORMS = {
    "vmap": "torch.vmap(function)(torch.ones(3))",
    "grad": "torch.func.grad(function)(torch.ones(()))",
    "jvp": "torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),))",
    "functionalize": "torch.func.functionalize(function)(torch.ones(3))",
    "trace": "torch.jit.trace(function, torch.ones(3), check_trace=False)",
}


@pytest.mark.parametrize("transform", rest_is_long(TRANSFORMS, "trace"))
def test_a_target_is_imported_by_a_function_that_is_transformed(world, transform) -> None:
    """Its transform and its graph are of what the function computes."""
    pytest.importorskip("torch")
    world.library()
    world.fix(body=PROBE + PATCH)
    outcome = world.run(f"""
        import torch, diffusers_quantfix
        def function(x):
            import lib.core
            return x * 2
        result = {TRANSFORMS[transform]}
        nodes = len(list(result.graph.nodes())) if hasattr(result, "graph") else 0
        tell(state=states("fix-f"), reason=reason("fix-f"), nodes=nodes)
    """)
    assert outcome["state"] == "applied", outcome["reason"]
    assert outcome["nodes"] in (0, 2)


def test_a_default_device_is_for_the_same_functions() -> None:
    """Our list against torch's own, in a module that a program may never import."""
    torch = pytest.importorskip("torch")
    from torch.utils._device import _device_constructors

    from diffusers_quantfix.surroundings import constructors_of

    # torch 2.5 lists two that no tensor is made by.
    assert _device_constructors() - constructors_of(torch) <= {torch.fill, torch.vander}
    assert constructors_of(torch) <= _device_constructors()


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_the_garbage_collector_stays_as_it_is(world, before) -> None:
    world.library(core=CORE)
    world.fix(
        body="import gc, sys\nsys.collects = []\n"
        "def broken(core): sys.collects.append(gc.isenabled()); return core.f() == 'broken'" + PATCH
    )
    outcome = world.run(f"""
        import gc, sys
        gc.{before}()
        import diffusers_quantfix, lib.core
        tell(f=lib.core.f(), meanwhile=sys.collects, after=gc.isenabled())
    """)
    assert outcome["f"] == "patched"
    assert outcome["meanwhile"] and set(outcome["meanwhile"]) == {before == "enable"} == {outcome["after"]}
