"""accelerate-attention-offload: torch's MultiheadAttention cannot run under sequential offload."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling

torch = pytest.importorskip("torch")

FIX_ID = "accelerate-attention-offload"
SHOWS = r"Tensor on device .* is not on the expected device|Cannot copy out of meta tensor|on the same device"


class Pool(torch.nn.Module):
    """As the head of SigLIP: a layer before, the attention, a layer behind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(64, 64)
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.after = torch.nn.Linear(64, 64)

    def forward(self, x):
        x = self.before(x)
        return self.after(self.attention(x, x, x)[0])


def run(model, device, grad: bool = False):
    inputs = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.set_grad_enabled(grad):
        return model(inputs).detach().cpu()


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("grad", [False, True], ids=["torch's fast path", "with gradients"])
def test_under_offload(gpu, grad):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    device = gpu.devices[0]
    expected = run(Pool().eval().to(device), device, grad)
    before = gpu.allocated(device)
    model = cpu_offload(Pool().eval(), spelled(device))

    def check(output):
        torch.testing.assert_close(output, expected)  # the hook may lead to torch's other path
        assert gpu.allocated(device) == before, "weights stayed on the device"

    for _ in range(2):
        check(run(model, device, grad))
    assert_goes_on(lambda: run(model, device, grad), check)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(run(model.to(device), device, grad), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_from_the_disk(gpu, tmp_path):
    from accelerate import disk_offload

    device = gpu.devices[0]
    expected = run(Pool().eval().to(device), device)
    model = disk_offload(Pool().eval(), str(tmp_path), spelled(device))
    for _ in range(2):
        assert torch.equal(run(model, device), expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_image_encoder_of_a_pipeline(gpu):
    siglip = pytest.importorskip("transformers.models.siglip")
    from accelerate import cpu_offload

    torch.manual_seed(0)
    config = siglip.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    model, device = siglip.SiglipVisionModel(config).eval(), gpu.devices[0]

    def pooled():
        with torch.no_grad():
            pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
            return model(pixels).pooler_output.cpu()

    expected = pooled() if model.to(device) else None
    cpu_offload(model.cpu(), spelled(device))
    assert torch.equal(pooled(), expected)


def test_the_classes_that_the_caller_names_are_kept(gpu):
    from accelerate import cpu_offload

    device = gpu.devices[0]
    model = torch.nn.Sequential(Pool(), Pool()).eval()
    cpu_offload(model, device, preload_module_classes=["Pool"])
    assert not hasattr(model[0].attention, "_hf_hook") and model[0]._hf_hook.place_submodules


def test_a_quantized_layer_inside_keeps_its_hook(gpu):
    """It has to be called: torch's function does not take packed weights."""
    from accelerate import cpu_offload

    model = Pool().eval()
    model.attention.out_proj = four_bit.linear("cpu")
    cpu_offload(model, gpu.devices[0])
    assert hasattr(model.attention.out_proj, "_hf_hook")
