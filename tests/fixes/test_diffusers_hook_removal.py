"""diffusers-hook-removal: a cache has no effect any more once group offloading removed a hook below its own."""

from __future__ import annotations

import pytest

from tests.fixes import lora_models as lora
from tests.fixes.group_offloaded import modes, offload
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
hooks = pytest.importorskip("diffusers.hooks.hooks", reason="hooks came with diffusers 0.33.0")

FIX_ID = "diffusers-hook-removal"
SHOWS = "the cache (skipped no block|is lost)|differ"
STEPS = 6
CACHES = {
    "FirstBlockCache": {"threshold": 10.0},
    "MagCache": {"mag_ratios": [1.0] * STEPS, "num_inference_steps": STEPS},
}
caches = pytest.mark.parametrize("cache", CACHES)


class Adds(hooks.ModelHook):
    """Adds to what goes in."""

    def __init__(self, name, calls):
        super().__init__()
        self.name, self.calls = name, calls

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(self.name)
        return args, kwargs


class Answers(Adds):
    """Calls what it stands above, as a cache does in a pass that it does not skip."""

    def new_forward(self, module, value):
        self.calls.append(f"{self.name} answers")
        return self.fn_ref.original_forward(value) + 1


@pytest.mark.defect(FIX_ID, shows="the cache is lost")
@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("removed", ["a", "b"])
def test_a_hook_below_others_is_removed(removed, recurse):
    remove_one_of_four(removed, recurse)


@pytest.mark.parametrize("removed", ["c", "d"])
def test_another_hook_is_removed(removed):
    remove_one_of_four(removed, recurse=True)


def remove_one_of_four(removed, recurse) -> None:
    module, calls = torch.nn.Identity(), []
    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    kinds = {"a": Adds, "b": Answers, "c": Answers, "d": Adds}
    for name, kind in kinds.items():
        registry.register_hook(kind(name, calls), name)
    if recurse:
        registry.remove_hook(removed)
    else:
        registry.remove_hook(name=removed, recurse=False)
    left = [name for name in "dcba" if name != removed]
    value = module(torch.zeros(1))
    answered = [name.split()[0] for name in calls if "answers" in name]
    assert answered == [name for name in left if kinds[name] is Answers], "the cache is lost"
    assert [name for name in calls if " " not in name] == left
    assert value.item() == len(answered)
    for name in left:
        registry.remove_hook(name)
    calls.clear()
    assert module(torch.zeros(1)).item() == 0 and not calls


def test_a_removal_that_fails(monkeypatch):
    """What is left can still be removed."""
    module, calls = torch.nn.Identity(), []
    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    for name, kind in {"a": Adds, "b": Answers}.items():
        registry.register_hook(kind(name, calls), name)

    def fails(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(registry.hooks["a"], "deinitalize_hook", fails)
    with pytest.raises(RuntimeError, match="no"):
        registry.remove_hook("a")
    assert module(torch.zeros(1)).item() == (1 if "b answers" in calls else 0)
    monkeypatch.undo()
    registry.remove_hook("b")
    registry.remove_hook("a")
    calls.clear()
    assert module(torch.zeros(1)).item() == 0 and not calls
    with pytest.raises((TypeError, KeyError)):
        registry.remove_hook()


@modes("block-stream", long=("block",))
@caches
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="diffusers>=0.35")
def test_blocks_are_skipped(gpu, cache, mode):
    """After the first pass, after a LoRA came and after it went, as on one device."""
    if not hasattr(diffusers, f"{cache}Config"):
        pytest.skip(f"this diffusers has no {cache}")
    pytest.importorskip("peft")
    if sentence := unmet("diffusers>=0.35"):
        pytest.skip(f"before, a LoRA cannot be loaded under group offload; {sentence}")
    device = gpu.devices[0]

    def results(offloaded):
        model = models.flux_transformer(num_layers=2, num_single_layers=2).to(device)
        if offloaded:
            offload(model, device, mode)
        model.enable_cache(getattr(diffusers, f"{cache}Config")(**CACHES[cache]))
        computed = []
        model.single_transformer_blocks[0].norm.register_forward_hook(lambda *_: computed.append(1))
        pipe = models.flux_pipeline(model)

        def run():
            computed.clear()
            return models.call_flux(pipe, device=device, dtype=torch.float32, steps=STEPS).cpu(), len(
                computed
            )

        yield run()
        yield run()
        pipe.load_lora_weights({name: one.clone() for name, one in lora.weights(1).items()})
        yield run()
        pipe.unload_lora_weights()
        yield run()
        model.disable_cache()
        yield run()

    for (mine, times), (other, expected) in zip(results(True), results(False), strict=True):
        assert times == expected, f"the cache skipped no block: {times} of {STEPS} passes computed it"
        torch.testing.assert_close(mine, other, msg="the outputs differ")


@modes("leaf-stream", "leaf-low")
@pytest.mark.skipif(not hasattr(diffusers, "TextKVCacheConfig"), reason="this diffusers has no TextKVCache")
@pytest.mark.defect(FIX_ID, shows="the outputs differ")
def test_each_prompt_has_its_own_text(gpu, mode):
    """TextKVCache is told by a hook of the model which prompt it is, and that stands above one of the stream."""
    from diffusers_quantfix.verify.models import nucleus

    device = gpu.devices[0]
    model = nucleus.transformer().to(device)
    expected = nucleus.outputs(model, device)
    assert not torch.equal(expected[0], expected[1])
    offload(model.cpu(), device, mode)
    model.enable_cache(diffusers.TextKVCacheConfig())
    for one, other in zip(nucleus.outputs(model, device), expected, strict=True):
        assert torch.equal(one, other), "the outputs differ"


@modes("leaf-stream", "block-stream")
@pytest.mark.skipif(not hasattr(diffusers, "SeaCacheConfig"), reason="this diffusers has no SeaCache")
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_cache_with_a_hook_of_the_model(gpu, mode):
    """SeaCache looks at the inputs of the model."""
    device = gpu.devices[0]
    torch.manual_seed(0)
    sizes = {
        "num_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 32,
        "freq_dim": 32,
    }
    channels = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "rope_max_seq_len": 32}
    model = diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), **sizes, **channels).eval()
    hidden, text = torch.randn(1, 4, 2, 8, 8, device=device), torch.randn(1, 5, 16, device=device)
    computed = []
    model.blocks[1].norm1.register_forward_hook(lambda *_: computed.append(1))

    def outputs():
        computed.clear()
        found = []
        with torch.no_grad():
            for step in range(STEPS):
                said = {"step_index": step, "sigma": 1 - step / STEPS, "num_inference_steps": STEPS}
                with model.cache_context("test", **said):
                    timestep = torch.full((1,), 900 - 100 * step, device=device)
                    moved = hidden * (1 - step / 100)
                    found.append(model(moved, timestep, text, return_dict=False)[0].cpu())
        return found, len(computed)

    cache = diffusers.SeaCacheConfig(threshold=50.0)
    model.to(device).enable_cache(cache)
    expected, times = outputs()
    assert 0 < times < STEPS
    model.disable_cache()
    offload(model.cpu(), device, mode)
    model.enable_cache(cache)
    for _ in range(2):
        found, now = outputs()
        assert now == times, f"the cache skipped no block: {now} of {STEPS} passes computed it"
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, msg="the outputs differ")
