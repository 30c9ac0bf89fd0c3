"""Layers that torchao quantized to int8 on the CPU are offloaded with a stream and ``low_cpu_mem_usage``."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from ..models import group_offload

    def build(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).bfloat16().eval()
        quantize_(model, Int8WeightOnlyConfig())
        return model

    def run(model, device):
        if not hasattr(model[0], "_diffusers_hook"):
            model.to(device)
        return group_offload.run(model, device)

    return group_offload.check(build, run, use_stream=True, low_cpu_mem_usage=True)
