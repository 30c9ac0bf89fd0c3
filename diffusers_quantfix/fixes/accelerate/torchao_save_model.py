"""``Accelerator.save_model`` fails for a model with torchao weights.

Symptom: RuntimeError "Attempted to access the data pointer on an invalid python storage" from
    ``Accelerator().save_model(model, folder)``.
Cause: the same as for ``accelerate-torchao-save-state``.
Upstream: not reported for accelerate; https://github.com/pytorch/ao/issues/2230 is about ``save_pretrained``.
Patch: such a model is written with ``torch.save``, as with ``safe_serialization=False``, which
    ``load_checkpoint_in_model`` and ``load_checkpoint_and_dispatch`` read. An earlier ``model.safetensors`` in the
    folder, which would have been overwritten, is removed; if several files are written, so are ``pytorch_model.bin``
    and the safetensors index: they would be loaded instead. Shards stay, as they do upstream.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights.wrappers import backend_of, has_no_address

FIX = Fix(
    __doc__,
    id="accelerate-torchao-save-model",
    module="accelerate.accelerator",
    claims={"accelerate": ">=0.33.0,<=1.15.0", "torchao": ""},
    patterns=("Attempted to access the data pointer on an invalid python storage",),
    frames=(r"\bsave_model\b",),
    asked_once=True,
)


def broken(accelerator: ModuleType) -> bool:
    """Does it find tensors that share memory by address?"""
    from accelerate.utils.modeling import id_tensor_storage

    resolve(accelerator, "Accelerator.save_model")
    return has_no_address(id_tensor_storage)


def patch(accelerator: ModuleType, draft: Draft) -> None:
    import inspect
    from pathlib import Path

    save = resolve(accelerator, "Accelerator.save_model")
    signature = inspect.signature(save)
    one_file, safe_file = accelerator.WEIGHTS_NAME, accelerator.SAFE_WEIGHTS_NAME

    def make(original):
        def save_model(*args, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            falls_back = given.arguments["safe_serialization"] and has_torchao(given.arguments["model"])
            if not falls_back:
                return original(*args, **kwargs)
            given.arguments["safe_serialization"] = False
            folder = Path(given.arguments["save_directory"])
            with names_of_files(given.arguments["self"]) as written:
                result = original(*given.args, **given.kwargs)
            if given.arguments["self"].is_main_process and written:
                earlier = [safe_file]
                if one_file not in written:
                    earlier += [one_file, f"{safe_file}.index.json"]
                for name in earlier:
                    if (folder / name).is_file():
                        (folder / name).unlink()
            return result

        return save_model

    @contextlib.contextmanager
    def names_of_files(self):
        """The names of the files that ``self`` saves inside the block."""
        names = []
        save, own = self.save, "save" in vars(self)

        def noting(state, file, *args, **kwargs):
            names.append(Path(file).name)
            return save(state, file, *args, **kwargs)

        self.save = noting
        try:
            yield names
        finally:
            if own:
                self.save = save
            else:
                del self.save

    def has_torchao(model):
        return any(backend_of(parameter) == "torchao" for parameter in model.parameters())

    draft.wrap_plain(resolve(accelerator, "Accelerator"), "save_model", make)
