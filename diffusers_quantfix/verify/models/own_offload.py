"""Pipelines with a model offload of their own, made of single layers."""

from __future__ import annotations

from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MODELS = ("vae", "text_encoder", "text_encoder_2", "projection_model", "language_model", "unet", "vocoder")
WIDTH = 64


def pipeline(name: str) -> Any:
    """One of class ``name``, on the CPU."""
    import inspect

    import diffusers
    import torch

    torch.manual_seed(0)
    cls = getattr(diffusers, name)

    known = {one: property(partial(_of_the_first, one)) for one in ("device", "dtype")}
    layer = type("Part", (torch.nn.Linear,), known)
    encoder = type("Encoder", (torch.nn.Module,), known)()
    encoder.text_model, encoder.text_projection = layer(WIDTH, WIDTH), layer(WIDTH, WIDTH)

    names = [one for one in inspect.signature(cls.__init__).parameters if one != "self"]
    parts: dict[str, Any] = dict.fromkeys(names)
    for one in set(names) & set(MODELS):
        parts[one] = encoder if one == "text_encoder" else layer(WIDTH, WIDTH)
    parts["vae"].config = type("Config", (), {"block_out_channels": (1,)})
    return cls(**parts)


def _of_the_first(name: str, model: Any) -> Any:
    return getattr(next(model.parameters()), name)


def run(pipe: Any) -> Any:
    """What the pipeline's models make of an input, one after the other, with the end of a call of the pipeline."""
    import torch

    with torch.no_grad():
        x = torch.linspace(-1, 1, WIDTH)
        for model in sequence(pipe):
            x = model(x.to(pipe._execution_device))
        pipe.maybe_free_model_hooks()
    return x


def sequence(pipe: Any) -> list[Any]:
    """The models in the order in which they run."""
    encoder = pipe.text_encoder
    others = (getattr(pipe, name, None) for name in MODELS if name not in ("vae", "text_encoder", "vocoder"))
    models = (encoder.text_model, encoder.text_projection, *others, pipe.vae, pipe.vocoder)
    return [model for model in models if model is not None]


def check(name: str) -> str:
    """Whether the pipeline knows its hooks, which a run's end takes to offload what is left on the device."""
    pipe = pipeline(name)
    pipe.enable_model_cpu_offload(device="cpu")
    assert getattr(pipe, "_all_hooks", None), (
        "the pipeline does not know its hooks: nothing offloads its vocoder"
    )
    hook = pipe.vocoder._hf_hook
    pipe.maybe_free_model_hooks()
    assert pipe.vocoder._hf_hook is not hook, "the end of a run does not offload the vocoder"
    return "the end of a run offloads the last model as well"
