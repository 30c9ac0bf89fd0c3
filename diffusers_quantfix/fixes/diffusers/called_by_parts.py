"""Modules that run without their ``forward`` are not onloaded under offload.

Symptom: no error, but Ideogram 4 runs its text encoder on the CPU under ``enable_model_cpu_offload()`` and block-level
    group offload: slow, and with CPU results. RuntimeError "Expected all tensors to be on the same device" from it
    under leaf-level group offload, and as a modular pipeline. "Tensor on device meta is not on the expected device
    cuda:0!" from Stable Audio 3 with given audio (inpainting, audio to audio) under sequential offload. RuntimeError
    "Expected all tensors to be on the same device" from UniDiffuser under model offload.
Cause: the hooks of accelerate and diffusers onload a module's weights when its ``forward`` is called.
    ``Ideogram4Pipeline._get_text_encoder_hidden_states`` runs the layers of its text encoder one by one, and
    ``SoftNormBottleneck`` in Stable Audio 3's autoencoder has ``encode`` and ``decode`` instead of ``forward``, and of
    UniDiffuser's text decoder its pipeline calls ``encode`` and ``generate_captions``.
Upstream: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/pipelines/ideogram4/pipeline_ideogram4.py#L371
    says so in a comment; not reported.
Patch: these functions run between the module's hooks, as its ``forward`` does.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve
from ...offloading.called import as_called

FIX = Fix(
    __doc__,
    id="diffusers-called-by-parts",
    targets=(
        Target(
            "diffusers-ideogram4-encoder",
            "diffusers.pipelines.ideogram4.pipeline_ideogram4",
            {"diffusers": ">=0.39.0,<=0.42.1"},
        ),
        Target(
            "diffusers-ideogram4-modular-encoder",
            "diffusers.modular_pipelines.ideogram4.encoders",
            {"diffusers": ">=0.39.0,<=0.42.1"},
        ),
        Target(
            "diffusers-same-bottleneck",
            "diffusers.models.autoencoders.autoencoder_same",
            {"diffusers": ">=0.40.0,<=0.42.1"},
        ),
        Target(
            "diffusers-unidiffuser-decoder",
            "diffusers.pipelines.deprecated.unidiffuser.modeling_text_decoder",
            {"diffusers": ">=0.38.0,<=0.42.1"},
        ),
        Target(
            "diffusers-unidiffuser-decoder-old",
            "diffusers.pipelines.unidiffuser.modeling_text_decoder",
            {"diffusers": ">=0.31.0,<0.38.0"},
        ),
    ),
    patterns=(
        r"ideogram4.{0,4000}Expected all tensors to be on the same device",
        r"autoencoder_same.{0,4000}Tensor on device meta is not on the expected device",
        r"modeling_text_decoder.{0,4000}Expected all tensors to be on the same device",
    ),
    frames=(
        "ideogram4",
        "_get_text_encoder_hidden_states",
        "autoencoder_same.py:encode",
        "modeling_text_decoder.py:encode|modeling_text_decoder.py:generate_captions",
    ),
    since="0.1.0",
)

# Module -> class, its functions
_RUN_PAST_FORWARD = {
    "pipeline_ideogram4": ("Ideogram4Pipeline", ("_get_text_encoder_hidden_states",)),
    "encoders": ("Ideogram4TextEncoderStep", ("_get_text_encoder_hidden_states",)),
    "autoencoder_same": ("SoftNormBottleneck", ("encode", "decode")),
    "modeling_text_decoder": ("UniDiffuserTextDecoder", ("encode", "generate_captions")),
}
_METHODS = ("SoftNormBottleneck", "UniDiffuserTextDecoder")  # of the module itself


def broken(module: ModuleType) -> bool:
    """Pass each function a module with a hook: does the hook onload it?"""
    name, functions = _RUN_PAST_FORWARD[module.__name__.rpartition(".")[2]]
    cls = resolve(module, name)
    for function in functions:
        resolve(cls, function)
    return not all(_is_brought(getattr(cls, function)) for function in functions)


def _is_brought(function: Any) -> bool:
    nothing = [None] * (function.__code__.co_argcount - 1)
    try:
        function(_Offloaded(), *nothing)
    except _Brought:
        return True
    except (AttributeError, TypeError):
        return False
    return False


class _Brought(Exception):
    """The weights are onloaded."""


class _Offloaded:
    """A module with a hook, for the probe; calling it as a whole also onloads it."""

    def __init__(self) -> None:
        self._hf_hook = self

    def pre_forward(self, *args: Any, **kwargs: Any) -> None:
        raise _Brought

    __call__ = pre_forward


def patch(module: ModuleType, draft: Draft) -> None:
    name, functions = _RUN_PAST_FORWARD[module.__name__.rpartition(".")[2]]
    cls = resolve(module, name)

    def make_encode(original):
        def _get_text_encoder_hidden_states(text_encoder, token_ids, attention_mask, pos_2d):
            def run(*args):
                return original(text_encoder, *args)

            states = as_called(text_encoder, run, token_ids, attention_mask, pos_2d)
            # The pipeline multiplies them by its mask, which stays on the text encoder's offload device.
            return [state.to(attention_mask.device) for state in states]

        return _get_text_encoder_hidden_states

    def make_method(original):
        def method(self, *args, **kwargs):
            return as_called(self, partial(original, self), *args, **kwargs)

        return method

    make = make_method if name in _METHODS else make_encode
    for function in functions:
        draft.wrap_plain(cls, function, make)
