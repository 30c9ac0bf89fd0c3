"""torch.compile traces what runs on the rig's devices, models under group offload too."""

from __future__ import annotations

import pytest

from tests.gate import unmet


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
