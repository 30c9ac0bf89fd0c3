"""``Accelerator.save_model`` fails for a model with weights of torchao.

Symptom: RuntimeError "Attempted to access the data pointer on an invalid python storage" from
    ``Accelerator().save_model(model, folder)``.
Cause: as of ``accelerate-torchao-save-state``.
Upstream: not reported for accelerate; torchao issue 2230 is about ``save_pretrained``.
Patch: such a model is written with ``torch.save``, as with ``safe_serialization=False``, which
    ``load_checkpoint_in_model`` and ``load_checkpoint_and_dispatch`` read. Files of safetensors in the folder that
    would have been overwritten are removed: they may be preferred.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve, written_in
from ...weights.wrappers import backend_of, has_no_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ...engine.draft import Draft

FIX = Fix(
    id="accelerate-torchao-save-model",
    title="Accelerator.save_model fails for a model with weights of torchao",
    module="accelerate.accelerator",
    claims={"accelerate": ">=0.33.0,<=1.15.0", "torchao": ""},
    upstream=("https://github.com/pytorch/ao/issues/2230",),
    symptom="Attempted to access the data pointer on an invalid python storage, from Accelerator.save_model()",
    patterns=("Attempted to access the data pointer on an invalid python storage",),
    frames=(r"\bsave_model\b",),
)


def broken(accelerator: ModuleType) -> bool:
    """Are tensors that share memory looked for by an address, with nothing of ours around it?"""
    from accelerate.utils.modeling import id_tensor_storage

    save_model = resolve(accelerator, "Accelerator.save_model")
    return not written_in(save_model, __file__) and has_no_address(id_tensor_storage)


def patch(accelerator: ModuleType, draft: Draft) -> None:
    import inspect
    import re
    from pathlib import Path

    save = resolve(accelerator, "Accelerator.save_model")
    signature = inspect.signature(save)
    safe_name = Path(accelerator.SAFE_WEIGHTS_NAME)
    earlier = re.compile(
        rf"{safe_name.stem}(-\d{{5}}-of-\d{{5}})?{re.escape(safe_name.suffix)}(\.index\.json)?"
    )

    def make(original):
        def save_model(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            falls_back = given.arguments["safe_serialization"] and has_torchao(given.arguments["model"])
            if not falls_back:
                return original(*args, **kwargs)
            given.arguments["safe_serialization"] = False
            result = original(*given.args, **given.kwargs)
            folder = Path(given.arguments["save_directory"])
            if given.arguments["self"].is_main_process and folder.is_dir():
                for file in folder.iterdir():
                    if earlier.fullmatch(file.name):
                        file.unlink(missing_ok=True)
            return result

        return save_model

    def has_torchao(model):
        return any(backend_of(parameter) == "torchao" for parameter in model.parameters())

    draft.wrap_plain(resolve(accelerator, "Accelerator"), "save_model", make)
