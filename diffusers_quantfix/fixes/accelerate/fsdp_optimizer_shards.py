"""FSDP 1 does not load the optimizer state from shards.

Symptom: after ``load_state`` with FSDP 1 and ``SHARDED_STATE_DICT`` the optimizer's momenta are zero, without an error.
    This happens with ``Accelerator.load_state`` in a new process. The model is restored, so the next steps differ. The
    Trainer of transformers uses the same function.
Cause: torch.distributed.checkpoint loads what it is asked for. ``load_fsdp_optimizer`` asks for what the optimizer
    holds, and before its first step an optimizer holds nothing. Up to accelerate 1.6 it asked for what the checkpoint
    contains. From 1.7 to 1.12 it also asks by parameter number, although the names were saved.
Upstream: not reported. https://github.com/huggingface/accelerate/issues/3971 shows the parameter numbers with FSDP 2.
Patch: before a checkpoint with states is read, the optimizer creates its entries in one step with zero gradients.
    Parameters, gradients and groups are restored after that step; upstream then loads all entries. An optimizer that
    has state is left alone. Up to 1.12 the entries are requested by name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.interruptions import heed_interruption
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="accelerate-fsdp-optimizer-shards",
    module="accelerate.utils.fsdp_utils",
    claims={"accelerate": ">=1.7.0,<=1.15.0"},
    harm="wrong result",
    since="0.1.0",
    asked_once=True,
)

# Each of these asks for what the checkpoint contains, or creates the entries.
_WITH_ENTRIES = {"load_sharded_optimizer_state_dict", "_init_optim_state", "init_optim_state"}


def broken(fsdp_utils: ModuleType) -> bool:
    """Does it load shards for FSDP 1, and neither read what the checkpoint contains nor create the entries?"""
    load = resolve(fsdp_utils, "load_fsdp_optimizer")
    names = names_used(load)
    if not {"optim_state_dict_to_load", "FileSystemReader"} <= names:
        return False
    return not names & _WITH_ENTRIES


def patch(fsdp_utils: ModuleType, draft: Draft) -> None:
    def make(original):
        by_number = "optim_state_dict" not in names_used(original)

        def load_fsdp_optimizer(
            fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index=0, *args, **kwargs
        ):
            from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

            made, asked = None, False
            version = getattr(fsdp_plugin, "fsdp_version", 1)
            if version == 1 and fsdp_plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
                name = f"{fsdp_utils.OPTIMIZER_NAME}_{optimizer_index}"
                if not optimizer.state and holds_states(input_dir, name):
                    made = make_entries(optimizer)
                asked = by_number and "state_dict" not in vars(optimizer)
                if asked:
                    ask_by_name(FullyShardedDataParallel, optimizer, model)
            try:
                return original(
                    fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, *args, **kwargs
                )
            except BaseException:
                if made is not None:
                    made.clear()  # what was loaded is in another mapping
                raise
            finally:
                if asked:  # never called if the checkpoint could not be read
                    vars(optimizer).pop("state_dict", None)

        return load_fsdp_optimizer

    draft.wrap_plain(fsdp_utils, "load_fsdp_optimizer", make)


def ask_by_name(fsdp: Any, optimizer: Any, model: Any) -> None:
    """Make ``optimizer.state_dict()`` return parameter names, once."""

    def state_dict():
        del optimizer.state_dict
        return fsdp.optim_state_dict(model, optimizer)

    optimizer.state_dict = state_dict


def holds_states(folder: Any, name: str) -> bool:
    """Whether the checkpoint in ``folder/name``, or in ``folder`` itself, has the optimizer state of a parameter.

    False if neither is a torch.distributed checkpoint: upstream says so, or reads one file per process.
    """
    import os

    from torch.distributed.checkpoint import FileSystemReader

    for place in (os.path.join(folder, name), folder):
        if os.path.exists(os.path.join(place, ".metadata")):
            keys = FileSystemReader(place).read_metadata().state_dict_metadata
            return any(key.startswith("optimizer.state.") for key in keys)
    return False


def make_entries(optimizer: Any) -> Any:
    """Make ``optimizer``, which has no state yet, create the entries for what it trains.

    Returns:
        The mapping with the entries, ``optimizer.state``. Parameters, gradients and groups are unchanged.

    Raises:
        RuntimeError: the optimizer cannot take such a step.
    """
    import torch

    # The step of accelerate's wrapper is counted, and a scaler may skip it.
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    groups = [dict(group) for group in optimizer.param_groups]
    # A process that holds no part of a parameter has no state for it either.
    chosen = [one for one in parameters if one.requires_grad and one.numel()]
    values = [parameter.detach().to("cpu", copy=True) for parameter in chosen]
    try:
        for parameter in parameters:
            parameter.grad = None
        for parameter in chosen:
            parameter.grad = torch.zeros_like(parameter)
        if chosen:
            # Not the instance's own `step`, in which schedulers count.
            type(optimizer).step(optimizer)
    except Exception as error:
        optimizer.state.clear()
        heed_interruption(error)
        raise RuntimeError(
            f"{type(optimizer).__name__} cannot make its state before the training goes on, so its state cannot be "
            "loaded from the shards of FSDP 1. Save and load it with FULL_STATE_DICT."
        ) from error
    except BaseException:
        optimizer.state.clear()
        raise
    finally:
        with torch.no_grad():
            for parameter, value in zip(chosen, values, strict=True):
                parameter.copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
    return optimizer.state
