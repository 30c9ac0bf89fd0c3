"""peft-merge-lycoris-gguf: merge_and_unload of a LoKr or LoHa of a GGUF model fails in the middle."""

from __future__ import annotations

import pytest

from tests.fixes import gguf_models

FIX_ID = "peft-merge-lycoris-gguf"
peft = pytest.importorskip("peft", reason="peft is not installed")
REFUSED = r"an adapter cannot be merged into GGUF weights \(\d+ layers of this FluxTransformer2DModel\)"
# Without us a layer of LoKr or LoHa does not even know the shape of the packed weight.
SHOWS = (
    r"The size of tensor a|shape '\[64, 36\]' is invalid for input of size 4096|mat1 and mat2 shapes|"
    "can't be cast to the desired output type Byte"
)


def adapted(transformer, kind):
    """The model of peft around it, with an adapter also for a layer that is not quantized."""
    import torch

    plain = torch.nn.Linear(64, 64).requires_grad_(False)
    bias = transformer.transformer_blocks[0].attn.to_q.bias
    plain.load_state_dict({"weight": torch.eye(64), "bias": bias}, strict=False)
    transformer.transformer_blocks[0].attn.to_q = plain
    targets = [name for name, _ in transformer.named_modules() if name.endswith(("to_q", "to_v"))]
    return peft.get_peft_model(
        transformer, getattr(peft, kind)(r=4, target_modules=targets, init_weights=False)
    )


@pytest.mark.parametrize("kind", ["LoKrConfig", "LoHaConfig"])
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.defect("peft-merge-gguf", shows=SHOWS)
def test_it_is_refused_before_anything_is_merged(tmp_path, kind, keyword):
    """From peft 0.18 on it is ``peft-merge-gguf`` that refuses."""
    import torch

    transformer = gguf_models.transformer(tmp_path)
    model = adapted(transformer, kind)
    first = transformer.transformer_blocks[0].attn.to_q.base_layer.weight.clone()
    with pytest.raises(ValueError, match=REFUSED):
        model.merge_and_unload(safe_merge=True) if keyword else model.merge_and_unload()
    assert not any(getattr(layer, "merged", False) for layer in model.modules())
    assert torch.equal(transformer.transformer_blocks[0].attn.to_q.base_layer.weight, first)


@pytest.mark.parametrize("kind", ["LoKrConfig", "LoHaConfig"])
def test_it_can_be_taken_out(tmp_path, kind):
    """``unload`` goes the same way and merges nothing."""
    import torch

    transformer = gguf_models.transformer(tmp_path)
    before = gguf_models.run(transformer)
    targets = [name for name, _ in transformer.named_modules() if name.endswith("to_v")]
    config = getattr(peft, kind)(r=4, target_modules=targets, init_weights=False)
    peft.get_peft_model(transformer, config).unload()
    assert torch.equal(gguf_models.run(transformer), before)
