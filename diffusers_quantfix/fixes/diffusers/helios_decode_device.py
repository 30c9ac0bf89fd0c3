"""Modular Helios cannot run under the offloading of a components manager.

Symptom: RuntimeError "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    from ``HeliosDecodeStep`` after ``ComponentsManager.enable_auto_cpu_offload()``, quantized or not.
Cause: it puts the mean of the latents on ``vae.device``, where the VAE's weights are between two uses, and not on the
    execution device, where the latents are.
Upstream: https://github.com/huggingface/diffusers/blob/v0.38.0/src/diffusers/modular_pipelines/helios/decoders.py#L81;
    fixed in 0.40.0.
Patch: the step sees a VAE whose ``device`` is the execution device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...models.plain_weights import InPlaceOf

FIX = Fix(
    __doc__,
    id="diffusers-helios-decode-device",
    module="diffusers.modular_pipelines.helios.decoders",
    claims={"diffusers": ">=0.38.0,<0.40"},
    fixed_in="diffusers 0.40.0",
    patterns=(r"modular_pipelines/helios/decoders.{0,2000}Expected all tensors to be on the same device",),
    frames=("modular_pipelines/helios/decoders.py:__call__",),
    since="0.1.0",
)


class _Asked(Exception):
    """The VAE was asked for its device."""


class _Vae:
    """A VAE for the probe; the step asks for its device before anything else that costs."""

    @property
    def device(self) -> Any:
        raise _Asked

    class config:
        z_dim = 1
        latents_mean = latents_std = (1.0,)


class _Components:
    vae = _Vae()
    _execution_device = "cpu"


def broken(decoders: ModuleType) -> bool:
    """Does the step ask the VAE for its device?"""
    step = resolve(decoders, "HeliosDecodeStep")
    asks = object.__new__(step)
    asks.get_block_state = lambda state: None
    try:
        resolve(step, "__call__")(asks, _Components(), None)
    except _Asked:
        return True
    except AttributeError:  # whatever it asks for next
        return False
    return False


def patch(decoders: ModuleType, draft: Draft) -> None:
    def make(upstream: Any) -> Any:
        def __call__(self: Any, components: Any, state: Any) -> Any:
            vae = InPlaceOf(components.vae, {"device": components._execution_device})
            _, state = upstream(self, InPlaceOf(components, {"vae": vae}), state)
            return components, state

        return __call__

    draft.wrap_plain(resolve(decoders, "HeliosDecodeStep"), "__call__", make)
