"""torch.compile traces what runs on the rig's devices, models under group offload too."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.marks import rest_is_long


def test_a_layer_in_one_graph(rig_devices):
    import torch

    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8).to("cuda:0"), torch.ones(2, 8, device="cuda:0")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_a_model_under_group_offload(rig_devices, stream):
    import torch

    pytest.importorskip("diffusers.hooks.group_offloading")
    if not unmet("diffusers>=0.35,<0.38") and (reason := unmet("torch>=2.9")):
        pytest.skip(
            f"older compilers cannot trace packaging 26, by which diffusers asks for torch's version; {reason}"
        )
    from tests.rig import models

    expected = models.call_flux(models.flux_pipeline().to("cuda:0"), dtype=torch.float32).cpu()
    pipe = models.flux_pipeline()
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cuda:0"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=stream,
    )
    pipe.transformer.compile(backend="eager")
    for _ in range(2):
        output = models.call_flux(pipe, device="cuda:0", dtype=torch.float32).cpu()
        assert torch.equal(output, expected)
    assert rig_devices.allocated("cuda:0") < 1024


@pytest.mark.parametrize("way", rest_is_long(["model", "sequential"], "model"))
@pytest.mark.parametrize("bits", rest_is_long([4, 8, 16], 4, 16))  # what is compiled is kept for the next
def test_a_model_under_offload_by_accelerate(rig_devices, tmp_path, bits, way):
    """accelerate before 1.13 lets its hooks be traced: our part of them ended in RecursionError."""
    import torch

    from tests.fixes import four_bit
    from tests.rig import models

    if unmet("torch>=2.9") or unmet("diffusers>=0.38"):
        pytest.skip("older compilers cannot trace packaging 26, by which diffusers asks for torch's version")
    dtype = torch.float32 if bits == 16 else torch.float16

    def run(compiled):
        plain = models.flux_transformer()
        if bits != 16:
            plain = four_bit.load(type(plain), models.saved(plain, tmp_path), bits=bits)
        pipe = models.flux_pipeline(plain)
        getattr(pipe, f"enable_{way}_cpu_offload")(device=torch.device("cuda:0"))
        if compiled:
            pipe.transformer.compile(backend="eager")
        return [models.call_flux(pipe, device="cuda:0", dtype=dtype, steps=3).cpu() for _ in range(2)]

    for output, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(output, expected)
