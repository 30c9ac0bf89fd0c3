"""accelerate-gguf-disk: GGUF models cannot be offloaded to disk."""

from __future__ import annotations

import pytest

from tests.fixes import gguf_models
from tests.fixes.callers import assert_goes_on, spelled
from tests.fixes.callers import spelling as spelling

FIX_ID = "accelerate-gguf-disk"
SHOWS = r"KeyError: None"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_disk_offload_is_exact(gpu, folder, tmp_path):
    import torch
    from accelerate import disk_offload

    device = gpu.devices[0]
    reference = gguf_models.run(gguf_models.transformer(folder).to(device), device)
    model = gguf_models.transformer(folder)
    count = len(gguf_models.weights_of(model))
    disk_offload(model, str(tmp_path), execution_device=spelled(device))

    def check(output):
        assert torch.equal(output, reference)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert len(gguf_models.weights_of(model)) == count > 0

    check(gguf_models.run(model, device))
    assert_goes_on(lambda: gguf_models.run(model, device), check)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_map_with_a_part_on_disk(folder, tmp_path):
    import torch
    from accelerate import dispatch_model

    model = gguf_models.transformer(folder)
    reference = gguf_models.run(model)
    places = {name: "cpu" for name, _ in model.named_children()}
    dispatch_model(
        model,
        {**places, "transformer_blocks": "disk"},
        main_device="cpu",
        offload_dir=str(tmp_path),
        force_hooks=True,
    )
    assert next(model.transformer_blocks.parameters()).is_meta
    assert torch.equal(gguf_models.run(model), reference)
