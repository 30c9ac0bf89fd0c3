"""A LoKr on a model under leaf-level group offloading."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoKrConfig, inject_adapter_in_model

    from ..models import group_offload

    config = LoKrConfig(r=4, target_modules=["0"], init_weights=False)

    def build(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        return inject_adapter_in_model(config, model).to(device).eval()

    def run(model, device):
        with torch.no_grad():
            return model(torch.ones(2, 256, device=device)).cpu()

    return group_offload.check(build, run)
