"""A torchao model with a config for each layer (FqnToConfig) cannot be loaded by a device map.

Symptom: ValueError "not enough values to unpack (expected 2, got 1)" from ``from_pretrained(device_map="auto")`` of a
    text encoder with rotary embeddings (Llama, Qwen, Gemma) and ``TorchAoConfig(FqnToConfig(...))``.
Cause: to find out how much fits, transformers sums up the buffers of each submodule, and asks for each whether it is
    quantized, by its name in that submodule. ``param_needs_quantization`` splits the name at a dot, which the name of a
    submodule's own buffer does not have.
Upstream: not reported.
Patch: a tensor of a name without a dot is not quantized. It belongs to the module that was asked about itself, whose
    own name, which the config would have to have, is not known there.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="transformers-torchao-buffer-size",
    module="transformers.quantizers.quantizer_torchao",
    claims={"transformers": ">=5.0.0,<=5.24.0", "torchao": ">=0.15"},
    patterns=(r"not enough values to unpack \(expected 2, got 1\)",),
    frames=("quantizer_torchao.py:param_needs_quantization", "FqnToConfig"),
    since="0.1.0",
)

_CLASS, _METHOD = "TorchAoHfQuantizer", "param_needs_quantization"


def broken(quantizer_torchao: ModuleType) -> bool:
    """Ask about a buffer of the module itself; does it fail?"""
    import torch
    from torchao.quantization import FqnToConfig

    cls = resolve(quantizer_torchao, _CLASS)
    config = SimpleNamespace(
        quant_type=FqnToConfig({}), include_input_output_embeddings=False, _get_ao_version=_any_version
    )
    quantizer = cls.__new__(cls)
    vars(quantizer).update(quantization_config=config, modules_to_not_convert=[])
    module = torch.nn.Module()
    module.register_buffer("table", torch.empty(0))
    try:
        resolve(cls, _METHOD)(quantizer, module, "table")
    except ValueError:
        return True
    return False


def _any_version() -> object:
    from packaging.version import Version

    return Version("1")


def patch(quantizer_torchao: ModuleType, draft: Draft) -> None:
    def make(original):
        def param_needs_quantization(self, model, param_name, **kwargs):
            if "." not in param_name and type(self.quantization_config.quant_type).__name__ == "FqnToConfig":
                return False
            return original(self, model, param_name, **kwargs)

        return param_needs_quantization

    draft.wrap_plain(resolve(quantizer_torchao, _CLASS), _METHOD, make)
