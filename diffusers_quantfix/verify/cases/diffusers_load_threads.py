"""A diffusers model in bfloat16 cannot be made; layers are made while another thread makes a model."""

from __future__ import annotations


def case(work: str) -> str | None:
    import json
    from pathlib import Path

    import torch
    from diffusers import AutoencoderKL
    from diffusers.models.modeling_utils import no_init_weights

    from ..models.threads import kept, overlapping

    AutoencoderKL(block_out_channels=(4,), norm_num_groups=1).save_pretrained(work)
    config = Path(work, "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "down_block_types": ["unknown"]}))
    with kept():
        before = torch.get_default_dtype()
        try:
            AutoencoderKL.from_pretrained(work, torch_dtype=torch.bfloat16)
        except ValueError as error:
            assert "unknown" in str(error), str(error)
        after = torch.get_default_dtype()
    assert after == before, f"the default dtype is {after}"
    one = overlapping(no_init_weights, lambda: torch.nn.init.constant_(torch.zeros(1), 1.0).item())
    assert one == 1.0, "a layer of another thread has no initial weights"
    return f"the default dtype is {after}, and layers have initial weights"
