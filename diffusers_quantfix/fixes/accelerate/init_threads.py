"""After models were loaded in threads, all new layers are on meta.

Symptom: after two threads have been in ``init_empty_weights`` at once, every new layer of the process is on meta, and
    so are the layers that another thread makes meanwhile.
Cause: ``init_on_device`` replaces ``torch.nn.Module.register_parameter`` for the whole process and puts back what it
    found: with two threads, the function of the other one.
Upstream: https://github.com/huggingface/diffusers/issues/14347, https://github.com/huggingface/diffusers/issues/4296,
    https://github.com/huggingface/peft/issues/3605.
Patch: it is replaced for the thread alone that is within the context manager. A thread that was started by a program
    within ``init_empty_weights`` makes layers with weights.
"""

from __future__ import annotations

import threading
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import names_used
from ...models.own_thread import in_own_thread

FIX = Fix(
    __doc__,
    id="accelerate-init-threads",
    targets=(
        Target("accelerate-init-on-device", "accelerate.big_modeling", {"accelerate": ">=0.34.2,<=1.15.0"}),
        Target("peft-init-on-device", "peft.utils.integrations", {"peft": ">=0.15.0,<=0.21.2"}),
        Target(
            "transformers-init-on-device",
            "transformers.integrations.accelerate",
            {"transformers": ">=4.51.1,<5.0.0"},
            fixed_in="transformers 5.0.0",
        ),
    ),
    patterns=(
        r"Exception in thread.{0,4000}Cannot copy out of meta tensor; no data",
        r"[Tt]hread.{0,1000}register_parameter",
        r"register_parameter.{0,1000}[Tt]hread",
    ),
    frames=("threading.py|concurrent/futures/thread.py", "meta"),
    asked_once=True,
)

_CONTEXT = ("init_on_device", "_init_on_device")
_SKIP = "_skip_init_on_device"  # of PEFT: sets an attribute of its context manager's function


def broken(module: ModuleType) -> bool:
    """Does the context manager set an attribute of ``torch.nn.Module``?"""
    name = _name(module)
    return bool(name) and "register_parameter" in names_used(vars(module)[name])


def patch(module: ModuleType, draft: Draft) -> None:
    name = _name(module)
    others = {name: threading.local()} if _SKIP in vars(module) else {}
    draft.wrap_plain(module, name, lambda original: in_own_thread(original, **others))
    if others:
        draft.wrap_plain(module, _SKIP, lambda original: in_own_thread(original, **others))


def _name(module: ModuleType) -> str:
    return next((name for name in _CONTEXT if name in vars(module)), "")
