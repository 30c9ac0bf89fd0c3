"""Merge adapters into the weights of an offloaded model, and unmerge them.

Fusing a LoRA adds its delta to the weights, unfusing subtracts it. peft's layers use the tensors that they find: under
sequential offload these are meta tensors, on which every operation succeeds without effect, while the weights of the
next run are in the hooks. Under group offload with a stream they may be copies. The fixes for diffusers' two ways to
fuse share this module.

One layer at a time is moved to its execution device, so that a merge needs no more memory than a run, and a quantized
weight is quantized again by that device's kernels.

Neither torch nor another library is imported here at module level.

Upstream: diffusers/loaders/lora_base.py, diffusers/loaders/peft.py; peft/tuners/tuners_utils.py (``BaseTunerLayer``;
its ``onload_layer`` has the same purpose, but diffusers does not use it).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from functools import partial

from ..engine.errors import Undecided
from ..finishing import finished
from ..offloading.disk import is_mapped
from ..offloading.groups import offload_between_passes
from ..offloading.hooks import group_again, group_config, is_sequentially_offloaded, offload_execution_device
from ..offloading.suspended import hooks_aside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["merges_reach_weights", "offloaded_adapter_layer", "unmerge_before_disabling"]

_VERBS = ("merge", "unmerge")


@contextlib.contextmanager
def merges_reach_weights(*models: Any) -> Iterator[None]:
    """In the block, ``merge`` and ``unmerge`` of peft layers in ``models`` change the real weights, offloaded or not.

    Objects that are not a ``torch.nn.Module`` are skipped, and layers that are not offloaded stay unchanged. Blocks may
    be nested (a pipeline fuses through its models).
    """
    lent: list[tuple[Any, str]] = []
    grouped: list[tuple[Any, Any]] = []
    with finished(lambda: [partial(_take_back, lent), *(partial(_group_again, *one) for one in grouped)]):
        for model in models:
            layers = _adapter_layers(model)
            config = _group_config(model) if layers else None
            for layer in layers:
                if config is not None:
                    _lend(lent, layer, partial(_brought, layer, config.onload_device, config.offload_device))
                elif is_sequentially_offloaded(layer):
                    _lend(lent, layer, partial(_unhooked, layer))
            if config is not None and any(owner in layers for owner, _ in lent):
                grouped.append((model, config))
        for model, _ in grouped:
            _offload_groups(model)
        yield


def _take_back(lent: list[tuple[Any, str]]) -> None:
    for layer, verb in lent:
        vars(layer).pop(verb, None)


def _group_again(model: Any, config: Any) -> None:
    """Set the groups of ``model`` up once more: with a stream, they keep copies of the weights from before."""
    if not any(is_mapped(group) for group in _groups(model)):
        group_again(model, config)


def unmerge_before_disabling(*models: Any) -> None:
    """Unmerge the adapters of offloaded ``models``, before these adapters are disabled.

    peft would do so in the next forward pass, where it finds meta tensors, or copies.
    """
    merged = [model for model in models if any(layer.merged for layer in _adapter_layers(model))]
    with merges_reach_weights(*merged):
        for model in merged:
            for layer in _adapter_layers(model):
                if "unmerge" in vars(layer) and layer.merged:
                    layer.unmerge()


def _lend(lent: list[tuple[Any, str]], layer: Any, at_hand: Callable[[], Any]) -> None:
    """Set ``merge`` and ``unmerge`` on the instance so that they run in ``at_hand()``, unless they are set already.

    What is set is in ``lent`` before.
    """
    for verb in _VERBS:
        if verb not in vars(layer):
            within = _within(at_hand, getattr(layer, verb))
            lent.append((layer, verb))
            vars(layer)[verb] = within


def _within(at_hand: Callable[[], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    # diffusers looks at the signature of ``merge``, which functools.wraps keeps.
    @functools.wraps(original)
    def act(*args: Any, **kwargs: Any) -> Any:
        with at_hand():
            return original(*args, **kwargs)

    return act


def _unhooked(layer: Any) -> Any:
    """Sequential offload: the weights are in the hooks."""
    return hooks_aside(layer, device=offload_execution_device(layer))


@contextlib.contextmanager
def _brought(layer: Any, device: Any, back: Any) -> Iterator[None]:
    """Group offload: the weights are on the CPU, where older releases cannot quantize."""
    with finished(lambda: [partial(layer.to, back)]):
        layer.to(device)
        yield


def _adapter_layers(model: Any) -> list[Any]:
    layers, torch = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("torch")
    if layers is None or torch is None or not isinstance(model, torch.nn.Module):
        return []
    return [module for module in model.modules() if isinstance(module, layers.BaseTunerLayer)]


def _group_config(model: Any) -> Any:
    """The group offload config of ``model``; None without group offload, or if diffusers itself offloads it to disk.

    Where this package has mapped the files, a merged weight stays in memory from then on, and the files do not change.
    """
    config = group_config(model)
    if getattr(config, "offload_to_disk_path", None) and not all(
        is_mapped(group) for group in _groups(model)
    ):
        return None
    return config


def _offload_groups(model: Any) -> None:
    """Offload the groups that a stream has prefetched, or that have stayed on their device."""
    for group in _groups(model):
        offload_between_passes(group)


def _groups(model: Any) -> Iterator[Any]:
    name = getattr(sys.modules.get("diffusers.hooks.group_offloading"), "_GROUP_OFFLOADING", None)
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry.get_hook(name) if registry is not None else None
        if hook is not None:
            yield hook.group


def offloaded_adapter_layer(cls: Any) -> Any:
    """A bare instance of the module class ``cls`` whose ``layer`` is an offloaded peft layer; for probes.

    ``layer.met_meta`` says whether the weight was on meta during ``unmerge``. The hook's execution device is the CPU.

    Raises:
        Undecided: accelerate or peft is not imported yet; until then nothing can be offloaded or merged.
    """
    for needed in ("accelerate.hooks", "peft.tuners.tuners_utils"):
        if needed not in sys.modules:
            raise Undecided(needed)
    hooks, layers = sys.modules["accelerate.hooks"], sys.modules["peft.tuners.tuners_utils"]
    torch = sys.modules["torch"]

    def unmerge(self: Any) -> None:
        self.met_meta = self.base_layer.weight.is_meta

    members = {"merged_adapters": (), "met_meta": False, "unmerge": unmerge}
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.layer = type("Layer", (torch.nn.Module, layers.BaseTunerLayer), members)()
    model.layer.base_layer = torch.nn.Linear(1, 1, bias=False)
    hook = hooks.AlignDevicesHook(execution_device=torch.device("cpu"), offload=True)
    hooks.add_hook_to_module(model.layer.base_layer, hook)
    return model
