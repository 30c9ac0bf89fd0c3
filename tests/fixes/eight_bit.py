"""8-bit layers and models for tests, and what they leave on a device."""

from __future__ import annotations

import contextlib
import gc

import pytest

from tests.gate import unmet

FEATURES = 64


def linear(device, features: int = FEATURES, bias: bool = True, threshold: float = 6.0, seed: int = 0):
    """A ``Linear8bitLt`` [features, features], quantized by bitsandbytes on its way to ``device``."""
    import torch
    from bitsandbytes.nn import Linear8bitLt

    layer = Linear8bitLt(features, features, bias=bias, has_fp16_weights=False, threshold=threshold)
    generator = torch.Generator().manual_seed(seed)
    # The deviation of a trained layer's weights: its outputs are no outliers for the next one.
    scale = features**-0.5
    weights = {
        name: scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in layer.named_parameters()
    }
    layer.load_state_dict(weights)
    return layer.half().to(device)


def stack(device, layers: int = 2):
    """A model of 8-bit layers with a normal one between them, on ``device``."""
    import torch

    parts = [linear(device, seed=i) for i in range(layers)]
    norm = torch.nn.LayerNorm(FEATURES, device=device, dtype=torch.float16)
    return torch.nn.Sequential(*parts[:1], norm, *parts[1:]).eval()


def batch(device, rows: int = 3):
    """Inputs [rows, features] in 16 bits, with one column of outliers, which bitsandbytes computes apart."""
    import torch

    inputs = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(7))
    inputs[:, 5] += 20
    return inputs.half().to(device)


def run(model, device):
    """The output of ``model`` on ``device``, on the CPU."""
    import torch

    with torch.no_grad():
        return model(batch(device)).cpu()


def assert_gone(gpu, device, allowed: int = 0) -> None:
    """Nothing of a model is left on ``device``."""
    left = gpu.allocated(device) - allowed
    assert left <= 0, f"{left} bytes stayed on {device}"


def layers_of(model) -> list:
    """The 8-bit layers of a model."""
    return [
        module for module in model.modules() if type(module).__name__ in ("Linear8bitLt", "Embedding8bit")
    ]


def assert_whole(model, device) -> None:
    """Every 8-bit weight and its companions are on ``device``, and CB is no second copy."""
    import torch

    device = torch.device(device)
    for layer in layers_of(model):
        weight = layer.weight
        assert type(weight).__name__ == "Int8Params", f"the weight became a {type(weight).__name__}"
        assert weight.device == device, f"the weight is on {weight.device}, not on {device}"
        holders = [weight, layer.state] if hasattr(layer, "state") else [weight]
        scales = [holder.SCB for holder in holders if holder.SCB is not None]
        assert scales, "the scales are lost"
        matrices = [vars(holder).get(name) for holder in holders for name in ("CB", "CxB")]
        for tensor in [*scales, *(tensor for tensor in matrices if tensor is not None)]:
            assert tensor.device == device, f"a companion is on {tensor.device}, not on {device}"
        for tensor in matrices:
            if tensor is not None:
                assert tensor.data_ptr() == weight.data_ptr(), "CB is a second copy of the weight"


def parameters_of(model) -> list[int]:
    """The identities of the parameters."""
    return [id(parameter) for parameter in model.parameters()]


@contextlib.contextmanager
def conversion_mode(name: str):
    """``torch.__future__``'s ``swap_module_params`` or ``overwrite_module_params`` on conversion."""
    import torch

    setter = getattr(torch.__future__, f"set_{name}_on_conversion")
    setter(True)
    try:
        yield
    finally:
        setter(False)
        gc.collect()


def skip_without_cpu_kernels() -> None:
    if sentence := unmet("bitsandbytes>=0.46"):
        pytest.skip(f"8-bit layers run on the CPU from 0.46 on; {sentence}")


# What upstream raises when it shards 8-bit weights; the last line is of torch 2.6, which shards on a GPU only.
SHARD_SHOWS = (
    "'Parameter' object has no attribute 'CB'"
    "|only Tensors of floating point dtype can require gradients"
    "|'Stream' object has no attribute 'record_event'"
)


@contextlib.contextmanager
def sharded_by(fully_shard):
    """A block in which ``fully_shard`` of a model works, over a group of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    skip_without_cpu_kernels()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    try:
        yield lambda model, **options: fully_shard(model, mesh=mesh, **options)
    finally:
        dist.destroy_process_group()
