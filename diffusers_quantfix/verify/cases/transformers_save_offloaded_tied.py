"""A language model whose output layer is its embedding is offloaded and saved."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch
    from accelerate import cpu_offload
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = f"{work}/model"
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=1, **sizes)).save_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder, device_map={"": "cpu"})
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, torch.device("cpu"))
    model.save_pretrained(f"{work}/saved")
    saved = GPT2LMHeadModel.from_pretrained(f"{work}/saved").state_dict()
    different = [name for name, tensor in weights.items() if not torch.equal(tensor, saved[name])]
    assert not different, f"what is saved is not the model: {different}"
    return "the saved model is the model, its tied weights included"
