"""What people do with a pipeline that is quantized and placed: adapters, casts, dequantizing.

Each takes (pipeline, run) and gives the outputs of its runs, to be compared with those of the same pipeline that is on
one device. ``run()`` gives the latents of one run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fixes import lora_models


def lora(seed: int) -> dict:
    return {name: 0.5 * tensor for name, tensor in lora_models.weights(seed).items()}


def _dora() -> dict:
    import torch

    weights = lora(5)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith("lora_B.weight")]:
        magnitude = 0.5 + torch.rand(weights[name].shape[0], generator=generator)
        weights[name.replace("lora_B.weight", "lora_magnitude_vector")] = magnitude
    return weights


def _lokr(model) -> dict:
    """As ``load_lora_adapter`` takes it: two factors [8, 8] for each projection [64, 64]."""
    import torch

    generator = torch.Generator().manual_seed(3)
    names = [name for name, _ in model.named_modules() if name.endswith((".to_q", ".to_k", ".to_v"))]
    return {
        f"{name}.lokr_{factor}": 0.3 * torch.randn(8, 8, generator=generator)
        for name in names
        for factor in ("w1", "w2")
    }


def _load(pipe, name: str = "one", seed: int = 1, **options) -> None:
    pipe.load_lora_weights(lora(seed), adapter_name=name, **options)


def _several(pipe, run):
    """Two LoRAs: weighed, switched off and on, exchanged in place, moved away and back, taken out one by one."""
    outputs = [run()]
    _load(pipe)
    _load(pipe, "two", 2)
    pipe.set_adapters(["one", "two"], [0.5, 1.0])
    outputs.append(run())
    pipe.set_adapters("two")
    outputs.append(run())
    pipe.disable_lora()
    outputs.append(run())
    pipe.enable_lora()
    outputs.append(run())
    pipe.set_lora_device(["one"], "cpu")
    outputs.append(run())
    pipe.delete_adapters("one")
    outputs.append(run())
    _load(pipe, "two", 4, hotswap=True)
    outputs.append(run())
    pipe.unload_lora_weights()
    outputs.append(run())
    assert _same(outputs[0], outputs[3]) and _same(outputs[0], outputs[8]), (
        "without its LoRAs it is another model"
    )
    assert _same(outputs[2], outputs[4]) and _same(outputs[2], outputs[5]) and _same(outputs[2], outputs[6])
    return outputs


def _fuse(pipe, run):
    """Merged into the weights, and taken out."""
    without = run()
    _load(pipe)
    loaded = run()
    pipe.fuse_lora()
    fused = run()
    pipe.unfuse_lora()
    unfused = run()
    pipe.unload_lora_weights()
    assert not _same(fused, without), "merging has no effect"
    assert (unfused - loaded).abs().max() <= ROUNDING and (run() - without).abs().max() <= ROUNDING
    return [fused, unfused]


def _fuse_for_good(pipe, run):
    _load(pipe)
    pipe.fuse_lora(lora_scale=0.5)
    pipe.unload_lora_weights()
    return [run()]


def _dora_loaded(pipe, run):
    pipe.load_lora_weights(_dora(), adapter_name="one")
    return [run()]


def _lokr_loaded(pipe, run):
    without = run()
    pipe.transformer.load_lora_adapter(_lokr(pipe.transformer), prefix=None, adapter_name="one")
    loaded = run()
    assert not _same(loaded, without), "the LoKr has no effect"
    return [loaded]


def _lokr_fused(pipe, run):
    without = run()
    pipe.transformer.load_lora_adapter(_lokr(pipe.transformer), prefix=None, adapter_name="one")
    loaded = run()
    pipe.transformer.fuse_lora()
    fused = run()
    pipe.transformer.unfuse_lora()
    assert not _same(fused, without), "merging has no effect"
    assert (run() - loaded).abs().max() <= ROUNDING
    return [fused]


def _fuse_qkv(pipe, run):
    pipe.transformer.fuse_qkv_projections()
    return [run()]


def _layerwise_casting(pipe, run):
    import torch

    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=pipe.transformer.dtype
    )
    return [run(), run()]


def _dequantize(pipe, run):
    pipe.transformer.dequantize()
    return [run()]


def _dequantize_with_lora(pipe, run):
    _load(pipe)
    pipe.transformer.dequantize()
    return [run()]


def _from_pipe(pipe, run):
    from diffusers import FluxPipeline

    other = FluxPipeline.from_pipe(pipe, torch_dtype=pipe.transformer.dtype)
    other.set_progress_bar_config(disable=True)
    return [run(other), run()]


def _same(one, other) -> bool:
    import torch

    return torch.equal(one, other)


# One unit in the last place of bfloat16 for the outputs, which are smaller than 4: what merging into a plain model and
# taking out again changes as well.
ROUNDING = 2**-6 + 2**-8

ACTIONS: dict[str, Callable] = {
    "several LoRAs": _several,
    "fuse": _fuse,
    "fuse for good": _fuse_for_good,
    "DoRA": _dora_loaded,
    "LoKr": _lokr_loaded,
    "LoKr fused": _lokr_fused,
    "fuse QKV": _fuse_qkv,
    "layerwise casting": _layerwise_casting,
    "dequantize": _dequantize,
    "dequantize with a LoRA": _dequantize_with_lora,
    "from_pipe": _from_pipe,
}
