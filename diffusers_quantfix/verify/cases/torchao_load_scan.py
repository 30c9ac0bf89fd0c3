"""64 torchao layers are restored from a checkpoint, and the comparisons of its names are counted."""

from __future__ import annotations

LAYERS = 64


def case(work: str) -> str | None:
    import torch
    from torchao.prototype.safetensors import safetensors_support
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    seen = 0

    class Name(str):
        __slots__ = ()

        def startswith(self, *args: object) -> bool:
            nonlocal seen
            seen += 1
            return str.startswith(self, *args)  # type: ignore[arg-type]

    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(LAYERS))).bfloat16()
    quantize_(layers, Float8WeightOnlyConfig())
    state = layers.state_dict()
    tensors, metadata = safetensors_support.flatten_tensor_state_dict(state)
    named = {Name(key): value for key, value in tensors.items()}
    found, left = safetensors_support.unflatten_tensor_state_dict(named, metadata)
    assert not left and list(found) == list(state), f"{len(left)} tensors are left"
    for name, tensor in found.items():
        same = tensor.dequantize() if hasattr(tensor, "qdata") else tensor
        wanted = state[name].dequantize() if hasattr(state[name], "qdata") else state[name]
        assert torch.equal(same, wanted), f"{name} differs"
    compared = f"{seen} names were compared to restore {LAYERS} layers of {len(tensors)} tensors"
    assert seen <= 8 * len(tensors), compared
    return compared
