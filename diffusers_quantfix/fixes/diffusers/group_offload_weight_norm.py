"""Audio autoencoders with weight normalization refuse group offloading.

Symptom: ValueError "AutoencoderOobleck does not support group offloading" from ``enable_group_offload`` of Stable Audio
    or its VAE; the same from those of Stable Audio 3, LongCat-Audio, Cosmos 3, MiniMax H3 and KVAE.
    ``apply_group_offloading``, which does not ask, ends in RuntimeError "Expected all tensors to be on the same device,
    but found at least two devices, cuda:0 and cpu!" in the first convolution, or leaves all normalized weights on the
    GPU.
Cause: torch's ``weight_norm`` computes the weight in a hook before ``forward``, and the group's parameters are onloaded
    only inside ``forward``. Nor is the computed weight a parameter: nothing offloads it.
Upstream: https://github.com/huggingface/diffusers/pull/10503 made the first of them refuse it, without a reason.
Patch: in a group-offloaded model the weight is computed after the parameters were onloaded, and dropped after
    ``forward``. The models that are exact so are allowed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix, Target
from ...engine.probe import resolve, written_in
from ...models.weight_norm import compute_weight, drop_weight, normalized_stand_in, norms, take_norms
from ...offloading.allowed import allow_group_offload, refuses_group_offload
from ...offloading.trial import offloads_on_cpu

_AUTOENCODERS = "diffusers.models.autoencoders"
# Module -> its model that refuses
_REFUSE = {
    f"{_AUTOENCODERS}.autoencoder_oobleck": "AutoencoderOobleck",
    f"{_AUTOENCODERS}.autoencoder_longcat_audio_dit": "LongCatAudioDiTVae",
    f"{_AUTOENCODERS}.autoencoder_cosmos3_audio": "Cosmos3AVAEAudioTokenizer",
    f"{_AUTOENCODERS}.autoencoder_kl_kvae_audio": "AutoencoderKLKVAEAudio",
    f"{_AUTOENCODERS}.autoencoder_kl_minimax_h3_audio": "AutoencoderKLMiniMaxH3Audio",
    f"{_AUTOENCODERS}.autoencoder_same": "AutoencoderSAME",
}
_LEVELS = ("_apply_group_offloading_block_level", "_apply_group_offloading_leaf_level")
_HOOK = "quantfix_weight_norm"

FIX = Fix(
    __doc__,
    id="diffusers-group-offload-weight-norm",
    targets=(
        Target(
            "diffusers-group-offload-computed-weight",
            "diffusers.hooks.group_offloading",
            {"diffusers": ">=0.33.0,<=0.42.1"},
        ),
        Target(
            "diffusers-oobleck-group-offload",
            f"{_AUTOENCODERS}.autoencoder_oobleck",
            {"diffusers": ">=0.33.0,<=0.42.1"},
        ),
        Target(
            "diffusers-longcat-audio-group-offload",
            f"{_AUTOENCODERS}.autoencoder_longcat_audio_dit",
            {"diffusers": ">=0.38.0,<=0.42.1"},
        ),
        Target(
            "diffusers-cosmos3-audio-group-offload",
            f"{_AUTOENCODERS}.autoencoder_cosmos3_audio",
            {"diffusers": ">=0.39.0,<=0.42.1"},
        ),
        Target(
            "diffusers-kvae-audio-group-offload",
            f"{_AUTOENCODERS}.autoencoder_kl_kvae_audio",
            {"diffusers": ">=0.42.0,<=0.42.1"},
        ),
        Target(
            "diffusers-minimax-audio-group-offload",
            f"{_AUTOENCODERS}.autoencoder_kl_minimax_h3_audio",
            {"diffusers": ">=0.40.0,<=0.42.1"},
        ),
        Target(
            "diffusers-same-group-offload",
            f"{_AUTOENCODERS}.autoencoder_same",
            {"diffusers": ">=0.40.0,<=0.42.1"},
        ),
    ),
    harm="error",
    patterns=(
        "(AutoencoderOobleck|LongCatAudioDiTVae|Cosmos3AVAEAudioTokenizer|AutoencoderKL(KVAE|MiniMaxH3)Audio"
        "|AutoencoderSAME) does not support group offloading",
    ),
    frames=("enable_group_offload", "Oobleck|LongCatAudio|Cosmos3AVAE|KVAEAudio|MiniMaxH3Audio|SAME"),
    since="0.1.0",
)


def broken(module: ModuleType) -> bool:
    """Does the model say that it cannot be offloaded in groups? Or, of ``group_offloading``: offload a layer on the
    CPU: is its weight still computed before its parameters are onloaded?"""
    import torch

    if module.__name__ in _REFUSE:
        return refuses_group_offload(module, _REFUSE[module.__name__])
    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    del layer.weight
    layer = normalized_stand_in(layer, "cpu")
    if not offloads_on_cpu(module, torch.nn.Sequential(layer), "leaf_level"):
        return not written_in(resolve(module, _LEVELS[-1]), __name__)
    return bool(norms(layer))


def patch(module: ModuleType, draft: Draft) -> None:
    if module.__name__ in _REFUSE:
        allow_group_offload(draft, module, _REFUSE[module.__name__])
    else:
        _normalize_later(module, draft)


def _normalize_later(group_offloading: ModuleType, draft: Draft) -> None:
    model_hook: Any = resolve(group_offloading, "ModelHook")
    registry_of = resolve(group_offloading, "HookRegistry").check_if_exists_or_initialize

    class NormalizeWeight(model_hook):
        """Computes the weight once the parameters are onloaded."""

        def initialize_hook(self, module):
            self.norms = take_norms(module)
            return module

        def pre_forward(self, module, *args, **kwargs):
            compute_weight(module, self.norms)
            return args, kwargs

        def post_forward(self, module, output):
            drop_weight(module, self.norms)
            return output

        def deinitalize_hook(self, module):
            module._forward_pre_hooks.update(self.norms)
            self.norms = {}
            return module

    def make_apply(original):
        def apply_group_offloading(module, *args, **kwargs):
            for layer in list(module.modules()):
                if norms(layer):
                    registry = registry_of(layer)
                    known = registry.get_hook(_HOOK)
                    if known is None:
                        # before the group's own: that one is around it, and onloads first
                        registry.register_hook(NormalizeWeight(), _HOOK)
                    else:
                        known.initialize_hook(layer)
            return original(module, *args, **kwargs)

        return apply_group_offloading

    def make_deinitialize(original):
        def deinitalize_hook(self, module):
            for root in self.group.modules:
                for layer in root.modules():
                    registry = vars(layer).get("_diffusers_hook")
                    hook = registry and registry.get_hook(_HOOK)
                    if hook is not None:  # it stays, and does nothing: diffusers is just removing another one
                        hook.deinitalize_hook(layer)
            return original(self, module)

        return deinitalize_hook

    for name in _LEVELS:
        draft.wrap_plain(group_offloading, name, make_apply)
    draft.wrap_plain(resolve(group_offloading, "GroupOffloadingHook"), "deinitalize_hook", make_deinitialize)
