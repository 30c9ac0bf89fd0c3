"""diffusers-text-kv-cache-group-offload: TextKVCache on a model whose blocks are offloaded already."""

from __future__ import annotations

import pytest

from tests.fixes.group_offloaded import modes, offload

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
if not hasattr(diffusers, "TextKVCacheConfig"):
    pytest.skip("this diffusers has no TextKVCache", allow_module_level=True)

FIX_ID = "diffusers-text-kv-cache-group-offload"
SHOWS = "Expected all tensors to be on the same device"


def check(gpu, mode, between=lambda model: None, **options) -> None:
    """The outputs are exact, before and after ``between``, with the cache and without it; then no weight is left."""
    from diffusers_quantfix.verify.models import nucleus

    device = gpu.devices[0]
    expected = nucleus.outputs(nucleus.transformer().to(device), device)
    assert not torch.equal(expected[0], expected[1]), "the prompts have no effect"
    model = nucleus.transformer()
    offload(model, device, {**mode, **options})
    for enabled in (True, True, False):
        if enabled:
            model.enable_cache(diffusers.TextKVCacheConfig())
        between(model)
        for one, other in zip(nucleus.outputs(model, device), expected, strict=True):
            assert torch.equal(one, other), "the outputs differ"
        left = [name for name, one in model.named_parameters() if one.device == device]
        assert not left, f"parameters stayed on the device: {left}"
        if enabled:
            model.disable_cache()


@modes("block", "block-stream", "block-low", "block-record")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_it_is_enabled_after_the_offload(gpu, mode):
    check(gpu, mode)


@modes("block")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_two_blocks_of_a_group(gpu, mode):
    check(gpu, mode, num_blocks_per_group=2)


@modes("block", "block-stream")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_group_on_disk(gpu, mode, tmp_path):
    check(gpu, mode, offload_to_disk_path=str(tmp_path))


@modes("block", "block-stream")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pass_that_is_stopped(gpu, mode):
    """In a block, when it has its weights."""
    from diffusers_quantfix.verify.models import nucleus

    def stopped(model):
        def stop(*_):
            raise RuntimeError("stopped")

        handle = model.transformer_blocks[1].encoder_proj.register_forward_hook(stop)
        try:
            with pytest.raises(RuntimeError, match="stopped"):
                nucleus.outputs(model, gpu.devices[0])
        except AssertionError as error:  # without the fix the pass ends before
            raise RuntimeError(str(error)) from error
        finally:
            handle.remove()
        # As a pipeline does behind its last step: it knows a prompt by its address.
        model._reset_stateful_cache()

    check(gpu, mode, stopped)


@modes("leaf", "leaf-stream")
def test_leaves_bring_themselves(gpu, mode):
    check(gpu, mode)
