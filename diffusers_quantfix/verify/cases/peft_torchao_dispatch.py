"""A LoRA for a layer quantized by ``torchao.quantize_``, and for a plain one."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    given = torch.linspace(-1, 1, 128, dtype=torch.bfloat16).view(2, 64)
    model = (
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    )
    found = 0
    for layers in (["1"], ["0"]):
        if layers == ["0"] and not _takes_weights():
            break
        whole = model[0]
        if layers == ["0"]:
            quantize_(whole, Int8WeightOnlyConfig())
        adapted = get_peft_model(model, LoraConfig(target_modules=layers, init_lora_weights=False)).eval()
        with torch.no_grad():
            assert torch.isfinite(adapted(given)).all()
        model = adapted.unload()
        found += 1
    return f"{found} LoRAs are loaded"


def _takes_weights() -> bool:
    """Whether peft accepts any weights of this torchao; if it refuses them, it does so with the fix too."""
    from peft.import_utils import is_torchao_available

    try:
        return bool(is_torchao_available())
    except ImportError:
        return False
