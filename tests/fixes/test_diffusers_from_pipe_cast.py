"""diffusers-from-pipe-cast: a pipeline made from another leaves that one as it was."""

from __future__ import annotations

import pytest

from tests.fixes import casts
from tests.rig import models

FIX_ID = "diffusers-from-pipe-cast"
SHOWS = r"Casting a quantized model|from_pipe changed the source"


def source(folder, backend=None, dtype=None):
    """A pipeline with a quantized transformer and the rest in bfloat16."""
    import torch

    model = models.flux_transformer() if backend is None else casts.loaded(backend, folder)
    parts = {"vae": models.vae(), "text_encoder": models.clip_text()}
    dtype = dtype or torch.bfloat16
    return casts.pipeline(model, **{name: part.to(dtype) for name, part in parts.items()})


def shared(one, other) -> set:
    return {
        name for name, part in one.components.items() if part is not None and part is getattr(other, name)
    }


@pytest.mark.parametrize("backend", [None, "gguf", "torchao", "quanto"], ids=str)
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.33")
def test_without_a_dtype_nothing_is_cast(tmp_path, backend):
    from diffusers import FluxPipeline

    pipeline = source(tmp_path, backend)
    before = casts.dtypes(pipeline)
    other = FluxPipeline.from_pipe(pipeline)
    assert casts.dtypes(pipeline) == before, "from_pipe changed the source"
    assert shared(other, pipeline) >= {"transformer", "vae", "text_encoder"}


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_with_a_dtype_the_new_one_is_cast(tmp_path):
    import torch
    from diffusers import FluxPipeline

    if not hasattr(__import__("diffusers"), "GGUFQuantizationConfig"):
        pytest.skip("this diffusers reads no GGUF files")
    pipeline = source(tmp_path, "gguf")
    pipeline.vae.to(torch.float16)
    before = casts.dtypes(pipeline)
    other = FluxPipeline.from_pipe(pipeline, torch_dtype=torch.float16)
    assert casts.dtypes(pipeline) == before, "from_pipe changed the source"
    assert casts.dtypes(other) == {**before, "text_encoder": {"float16"}, "vae": {"float16"}}
    assert shared(other, pipeline) >= {"transformer", "vae"}
    assert other.text_encoder is not pipeline.text_encoder
    assert all(
        a.data_ptr() != b.data_ptr()
        for a, b in zip(other.text_encoder.parameters(), pipeline.text_encoder.parameters(), strict=True)
    )


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_4bit_pipeline(gpu, tmp_path):
    """The quantized model is shared; the source is neither cast nor moved."""
    import torch
    from diffusers import FluxPipeline, FluxTransformer2DModel

    from tests.fixes import four_bit

    models.flux_transformer().save_pretrained(tmp_path)
    model = four_bit.load(FluxTransformer2DModel, tmp_path)
    pipeline = casts.pipeline(model, vae=models.vae().to(torch.bfloat16))
    before = casts.dtypes(pipeline)
    other = FluxPipeline.from_pipe(pipeline, torch_dtype=torch.float16)
    assert casts.dtypes(pipeline) == before, "from_pipe changed the source"
    assert other.transformer is model and other.vae.dtype == torch.float16
    four_bit.assert_whole(model, gpu.devices[0])


def test_plain_pipelines_cast_as_upstream_does(tmp_path):
    """A named dtype without quantized components: components are shared, and cast."""
    import torch
    from diffusers import FluxPipeline

    pipeline = source(tmp_path)
    other = FluxPipeline.from_pipe(pipeline, torch_dtype=torch.float16)
    assert shared(other, pipeline) >= {"transformer", "vae", "text_encoder"}
    assert set.union(*casts.dtypes(other).values()) == {"float16"}


@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_an_offloaded_source(gpu, tmp_path, offload):
    """The copy is whole and free of hooks; the source stays offloaded and runs as before."""
    import torch
    from diffusers import FluxPipeline

    device = gpu.devices[0]
    pipeline = source(tmp_path, "gguf", torch.float32)
    getattr(pipeline, f"enable_{'model' if offload == 'model' else 'sequential'}_cpu_offload")(
        gpu_id=device.index
    )
    hook = pipeline.text_encoder._hf_hook
    other = FluxPipeline.from_pipe(pipeline, torch_dtype=torch.bfloat16)
    assert pipeline.text_encoder._hf_hook is hook and pipeline.text_encoder.dtype == torch.float32
    assert {(p.device.type, p.dtype) for p in other.text_encoder.parameters()} == {("cpu", torch.bfloat16)}
    assert not any(hasattr(module, "_hf_hook") for module in other.text_encoder.modules())
    ids = torch.ones(1, 77, dtype=torch.long)
    with torch.no_grad():
        other.text_encoder(ids)
        reference = models.clip_text()(ids).last_hidden_state
        torch.testing.assert_close(
            pipeline.text_encoder(ids.to(device)).last_hidden_state.cpu(), reference, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("keyword", [{}, {"torch_dtype": None}])
def test_to_of_the_new_pipeline_casts_again(tmp_path, keyword):
    import torch
    from diffusers import FluxPipeline

    other = FluxPipeline.from_pipe(source(tmp_path, None), **keyword)
    other.to(dtype=torch.float16)
    assert set.union(*casts.dtypes(other).values()) == {"float16"}
