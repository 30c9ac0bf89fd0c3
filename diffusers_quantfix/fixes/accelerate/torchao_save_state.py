"""``Accelerator.save_state`` fails for a model with torchao weights.

Symptom: RuntimeError "Attempted to access the data pointer on an invalid python storage" when saving the state of LoRA
    training on a torchao model.
Cause: accelerate writes safetensors unless told otherwise. Before that it looks for tensors that share memory, by their
    data address; a torchao weight is a wrapper class without one, and safetensors could not hold it.
Upstream: not reported for accelerate; https://github.com/pytorch/ao/issues/2230 is about ``save_pretrained``.
Patch: such a model is written with ``torch.save``, as with ``safe_serialization=False``; ``load_state`` finds either
    file. The safetensors file that would have been overwritten is removed: it would take precedence.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.wrappers import has_no_address

FIX = Fix(
    __doc__,
    id="accelerate-torchao-save-state",
    module="accelerate.checkpointing",
    claims={"accelerate": ">=0.34.2,<=1.15.0", "torchao": ""},
    patterns=("Attempted to access the data pointer on an invalid python storage",),
    frames=("accelerate/checkpointing.py|save_state",),
    asked_once=True,
)


def broken(checkpointing: ModuleType) -> bool:
    """Does it find tensors that share memory by address?"""
    resolve(checkpointing, "load_accelerator_state")
    from accelerate.utils.modeling import id_tensor_storage

    return has_no_address(id_tensor_storage)


def patch(checkpointing: ModuleType, draft: Draft) -> None:
    import inspect
    from pathlib import Path

    signature = inspect.signature(resolve(checkpointing, "save_accelerator_state"))
    safe_name = Path(checkpointing.SAFE_WEIGHTS_NAME)

    def make(original):
        def save_accelerator_state(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            states = given.arguments["model_states"]
            falls_back = given.arguments["safe_serialization"] and any(map(has_torchao, states))
            given.arguments["safe_serialization"] = given.arguments["safe_serialization"] and not falls_back
            result = original(*given.args, **given.kwargs)
            if falls_back:
                for index in range(len(states)):
                    name = f"{safe_name.stem}_{index}{safe_name.suffix}" if index else safe_name.name
                    # An earlier state's file in this folder, which would have been overwritten: loading looks for it
                    # first. Another process may already have removed it.
                    Path(given.arguments["output_dir"], name).unlink(missing_ok=True)
            return result

        return save_accelerator_state

    def has_torchao(state):
        return any(type(tensor).__module__.startswith("torchao.") for tensor in state.values())

    draft.wrap_plain(checkpointing, "save_accelerator_state", make)
