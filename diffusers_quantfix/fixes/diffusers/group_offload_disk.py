"""The state dict of a model that is group-offloaded to disk is uninitialised memory, and so is the model without hooks.

Symptom: ``save_pretrained`` of a model under ``enable_group_offload(offload_to_disk_path=...)`` writes noise, without
    an error; loaded again it gives NaN. Loading a LoRA at leaf level gives NaN at once, at block level KeyError
    "tensor_32".
Cause: ``ModuleGroup.offload_`` writes its tensors to a file and replaces them by ``torch.empty_like``. Only ``onload_``
    reads the file. ``state_dict()`` does not, nor does the removal of the hooks. When a LoRA is loaded, diffusers
    removes the hooks, groups the model again, and writes the uninitialised memory to new files.
Upstream: no issue.
Patch: a module whose tensors a group has on disk gets a state-dict hook, which reads its tensors from the group's file.
    When the offload hook is removed, the group gets its tensors back, on the offload device, and the file that it wrote
    is deleted. A file that was there before, of a group with other tensors, raises an error before anything is
    offloaded.
"""

from __future__ import annotations

import os

from ...engine.fix import Fix
from ...engine.probe import resolve
from ...offloading.group_tensors import rejoin
from ...offloading.uncompiled import uncompiled, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ...engine.draft import Draft

FIX = Fix(
    id="diffusers-group-offload-disk",
    title="a model that is group-offloaded to disk is saved as uninitialised memory",
    module="diffusers.hooks.group_offloading",
    claims={"diffusers": ">=0.34.0,<=0.42.1"},
    upstream=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/hooks/group_offloading.py#L314",
    ),
    symptom="NaN, or noise, from a model that was saved while it was group-offloaded to disk, or that a LoRA was "
    "loaded into",
    harm="wrong result",
    frames=("offload_to_disk_path", "group_offload", "disk"),
    hot=True,
)

_GROUP = "_quantfix_disk_group"
_IS_EMPTY = "_quantfix_is_empty"
_WROTE = "_quantfix_wrote_its_file"
_OTHER_TENSORS = (
    "{} holds other tensors than the group of modules that is to be offloaded there. Delete it, or give another "
    "`offload_to_disk_path`."
)


def broken(group_offloading: ModuleType) -> bool:
    """Offload a layer whose file is marked as written; does its state dict silently differ from its weights?

    Nothing is written: an upstream release, or this fix, that reads the file does not find it, and raises.
    """
    import torch

    cls = resolve(group_offloading, "ModuleGroup")
    resolve(cls, "offload_")
    layer = torch.nn.Linear(1, 1, bias=False)
    group = cls.__new__(cls)
    group.modules, group.parameters, group.buffers = [layer], [], []
    group.offload_leader, group.stream, group.record_stream = layer, None, False
    group.onload_device = group.offload_device = torch.device("cpu")
    group.offload_to_disk_path = os.devnull
    group.safetensors_file_path = os.path.join(os.devnull, "none.safetensors")
    group._is_offloaded_to_disk = True
    group.cpu_param_dict = {}
    group.tensor_to_key = {layer.weight: "tensor_0"}
    group.key_to_tensor = {"tensor_0": layer.weight}
    before = layer.weight.data_ptr(), layer.weight.data
    group.offload_()
    try:
        state = layer.state_dict()
    except Exception:
        return False
    return bool(state["weight"].data_ptr() != before[0])


def patch(group_offloading: ModuleType, draft: Draft) -> None:
    group = resolve(group_offloading, "ModuleGroup")
    hook = resolve(group_offloading, "GroupOffloadingHook")

    def make_offload(original):
        original = within(original)

        def offload_(self):
            if self.offload_to_disk_path is None:
                return original(self)
            if not self._is_offloaded_to_disk:
                check_file(self)
            result = original(self)
            if _IS_EMPTY not in vars(self):
                for module in owners(self):
                    vars(module)[_GROUP] = self
                    if fill_from_disk not in module._state_dict_hooks.values():
                        module._register_state_dict_hook(fill_from_disk)
            setattr(self, _IS_EMPTY, True)
            return result

        return uncompiled(offload_)

    def make_onload(original):
        original = within(original)

        def onload_(self):
            result = original(self)
            if self.offload_to_disk_path is not None:
                setattr(self, _IS_EMPTY, False)
            return result

        return uncompiled(onload_)

    def make_deinitialize(original):
        def deinitalize_hook(self, module):
            if vars(self.group).get("offload_to_disk_path") is not None:
                restore(self.group)
            return original(self, module)

        return deinitalize_hook

    resolve(hook, "deinitalize_hook")
    draft.wrap_plain(group, "offload_", make_offload)
    draft.wrap_plain(group, "onload_", make_onload)
    draft.wrap_plain(hook, "deinitalize_hook", make_deinitialize)


def check_file(group: Any) -> None:
    """Before the first offload: a file that exists already has to hold these tensors.

    Raises:
        ValueError: it is not.
    """
    path = group.safetensors_file_path
    there = os.path.exists(path)
    setattr(group, _WROTE, not there)
    if not there:
        return
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if shapes != {key: list(tensor.shape) for tensor, key in group.tensor_to_key.items()}:
        raise ValueError(_OTHER_TENSORS.format(path))


def restore(group: Any) -> None:
    """Restore the tensors of ``group`` on the offload device, and delete the file if the group wrote it.

    Afterwards its modules are ordinary modules.
    """
    import torch

    if vars(group).get(_IS_EMPTY):
        from safetensors.torch import load_file

        loaded = load_file(group.safetensors_file_path, device="cpu")
        with torch.inference_mode(False), torch.no_grad():
            for tensor, key in group.tensor_to_key.items():
                # A copy: the tensors of the file are views of it.
                tensor.data = loaded.pop(key).to(group.offload_device, copy=True)
            rejoin(group)
        setattr(group, _IS_EMPTY, False)
    for module in owners(group):
        if vars(module).get(_GROUP) is group:
            del vars(module)[_GROUP]
            for key, hook in list(module._state_dict_hooks.items()):
                if hook is fill_from_disk:
                    del module._state_dict_hooks[key]
    if vars(group).pop(_WROTE, False) and os.path.exists(group.safetensors_file_path):
        os.remove(group.safetensors_file_path)


def fill_from_disk(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace the tensors of ``module`` itself in ``state_dict`` by those in the file of its group."""
    group = vars(module).get(_GROUP)
    if group is None or not vars(group).get(_IS_EMPTY):
        return
    from safetensors import safe_open

    with safe_open(group.safetensors_file_path, framework="pt", device="cpu") as file:
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            key = None if tensor is None else group.tensor_to_key.get(tensor)
            # With `keep_vars` the caller wants the parameters themselves, not their data.
            if key is not None and state_dict.get(prefix + name, tensor) is not tensor:
                state_dict[prefix + name] = file.get_tensor(key)


def owners(group: Any) -> list[Any]:
    """The modules that own the tensors of ``group``."""
    trees = [*group.modules, *([group.offload_leader] if group.parameters or group.buffers else [])]
    found = {}
    for tree in trees:
        for module in tree.modules():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if any(tensor is not None and tensor in group.tensor_to_key for tensor in tensors):
                found[id(module)] = module
    return list(found.values())
