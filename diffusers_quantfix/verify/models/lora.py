"""A tiny pipeline with LoRAs on the CPU, for the cases."""

from __future__ import annotations

from .flux import transformer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def pipeline(**components: Any) -> Any:
    """A FluxPipeline with a random transformer of two blocks; other models are None unless given."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    parts = {**dict.fromkeys(names), "transformer": transformer(), **components}
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


def weights(model: Any, prefix: str, layers: tuple[str, ...] = ("to_q", "to_v")) -> dict[str, Any]:
    """A state dict of a random LoRA of rank 4, with a clear effect, for the named Linear layers of ``model``."""
    import torch

    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(layers):
            for part, shape in (("A", (4, layer.in_features)), ("B", (layer.out_features, 4))):
                found[f"{prefix}.{name}.lora_{part}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    return found


def load(pipe: Any) -> Any:
    """``pipe`` with a LoRA for its transformer."""
    pipe.load_lora_weights(weights(pipe.transformer, "transformer"), adapter_name="lora")
    return pipe


def run(pipe: Any) -> Any:
    """The prediction of the transformer for fixed inputs."""
    import torch

    from . import four_bit

    return four_bit.run_flux(pipe.transformer, torch.device("cpu"))


def run_with(pipe: Any, config: Any) -> str:
    """Run with an adapter on the attention layers, made with a peft config class such as LoKrConfig."""
    before = run(pipe)
    names = [name for name, _ in pipe.transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    pipe.transformer.add_adapter(config(r=4, target_modules=names, init_weights=False))
    off = (run(pipe) - before).abs().max().item()
    assert 0 < off < float("inf"), "the adapter has no effect"
    return f"the adapter changes the output by {off:.2g}"


def offload(model: Any) -> None:
    """Sequential offload of one model with the CPU as its device: the weights are on meta between two uses."""
    import torch
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cpu"))
