"""quanto-int4-cpu: int4 weights in bfloat16 cannot be on the CPU (0.2.5, 0.2.6)."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

FIX_ID = "quanto-int4-cpu"
SHOWS = r"Could not run 'aten::_convert_weight_to_int4pack' with arguments from the 'CPU' backend"


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_in_bfloat16_is_quantized_and_runs():
    import torch

    reference = q.run(q.plain_layers())
    output = q.run(q.layers("qint4", torch.bfloat16), torch.bfloat16)
    assert q.error(output, reference) < q.TOLERANCE["int4"]


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_checkpoint_is_loaded():
    """A state dict in the packing of no kernel, as every saved model has it; loading chooses the kernel."""
    import torch

    library = q.quanto()
    model = q.layers("qint4", torch.float16)  # which no release repacks on the CPU
    state = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    again = q.plain_layers(torch.bfloat16)
    library.requantize(again, state, library.quantization_map(model))
    assert q.error(q.run(again, torch.bfloat16), q.run(model, torch.float16)) < 0.03


def test_without_the_kernel_the_weight_is_of_the_plain_class():
    """And other devices are upstream's business."""
    import torch

    import diffusers_quantfix as qf

    if qf.status()[FIX_ID].state != "applied":
        pytest.skip("this release of quanto has the kernel of the CPU")
    weight = q.layers("qint4", torch.bfloat16)[0].weight
    assert type(weight).__name__ == "WeightQBitsTensor"
    assert torch.equal(weight.to("cpu").dequantize(), weight.dequantize())
