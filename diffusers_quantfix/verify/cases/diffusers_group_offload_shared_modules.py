"""A transformer, and a ControlNet with its first layer, under group offloading with streams."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..case import CannotReproduce, NeedsDevice

    if not torch.cuda.is_available():
        raise NeedsDevice("needs a CUDA device")
    try:
        from diffusers.hooks import apply_group_offloading
    except ImportError:
        raise CannotReproduce("this diffusers has no group offloading") from None
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    shared, one, other = (torch.nn.Linear(8, 8).requires_grad_(False).to(device) for _ in range(3))
    transformer, controlnet = torch.nn.Sequential(shared, one), torch.nn.Sequential(shared, other)
    inputs = torch.randn(2, 8, device=device)
    expected = transformer(controlnet(inputs))
    for model in (transformer.cpu(), controlnet.cpu()):
        apply_group_offloading(
            model,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=True,
        )
    for _ in range(2):
        assert torch.equal(transformer(controlnet(inputs)), expected), "the output differs"
    return "both models run; output exact"
