"""Every backend in every way to load it: each weight lies where the map says, and the output is that of the model that
was loaded without a map.

What upstream refuses by design is listed in REFUSED with its message.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gate import unmet
from tests.rig import models
from tests.sweep.backends import ALL_BACKENDS, in_turn
from tests.sweep.placements import PLACEMENTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.37")), reason="the sweep is about the newest releases"),
]

PARTS = ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out", "pos_embed")
SPREAD = {**dict.fromkeys(PARTS, 0), "transformer_blocks": 1, "single_transformer_blocks": 1}
# name -> (the options of from_pretrained, the devices that may hold weights)
MAPS: dict[str, tuple[dict, set[str]]] = {
    # bitsandbytes quantizes on the GPU, where there is one, and stays there
    "none": ({}, {"cpu", "cuda:0"}),
    "auto": ({"device_map": "auto"}, {"cuda:0", "cuda:1"}),
    "balanced": ({"device_map": "balanced"}, {"cuda:0", "cuda:1"}),
    "sequential": ({"device_map": "sequential"}, {"cuda:0", "cuda:1"}),
    "auto, the first is full": (
        {"device_map": "auto", "max_memory": {0: 0, 1: "1GB"}},
        {"cuda:1"},
    ),
    "cuda": ({"device_map": "cuda"}, {"cuda:0"}),
    "cuda:1": ({"device_map": "cuda:1"}, {"cuda:1"}),
    "number": ({"device_map": 1}, {"cuda:1"}),
    "dict of a number": ({"device_map": {"": 1}}, {"cuda:1"}),
    "dict of a text": ({"device_map": {"": "cuda:1"}}, {"cuda:1"}),
    "per module": ({"device_map": SPREAD}, {"cuda:0", "cuda:1"}),
}
SOURCES = ("fresh", "saved", "shards")

# (kind, map, source) as regular expressions -> the message with which it is refused by design.
REFUSED: dict[tuple[str, str, str], str] = {
    ("quanto.*", "per module", ".*"): "currently not supported with Diffusers and the Quanto backend",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(kind, source) -> the folder that is loaded."""
    import torch

    folder = tmp_path_factory.mktemp("loading")
    plain = models.saved(models.flux_transformer(), folder / "plain")
    made: dict[tuple[str, str], Path] = {}

    def folder_of(kind, source):
        if source == "fresh":
            return plain
        if (kind, source) not in made:
            more = {"max_shard_size": "60KB"} if source == "shards" else {}
            place = folder / f"{kind}-{source}"
            ALL_BACKENDS[kind](plain, torch.bfloat16, {"": "cuda:0"}).save_pretrained(place, **more)
            if source == "shards":
                assert list(place.glob("*.index.json")), "one file only"
            made[kind, source] = place
        return made[kind, source]

    return folder_of


_references: dict = {}


def reference(kind, folder):
    """The output of the model that was loaded onto one device."""
    import torch

    if kind not in _references:
        _references[kind] = run(ALL_BACKENDS[kind](folder, torch.bfloat16, {"": "cuda:0"}))
    return _references[kind]


def run(model):
    import torch

    device = model.x_embedder.bias.device
    return models.call_flux(models.flux_pipeline(model), device=device, dtype=torch.bfloat16).cpu()


def refusal(*said):
    for pattern, message in REFUSED.items():
        if all(map(re.fullmatch, pattern, said)):
            return message
    return ""


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("plan", MAPS)
@pytest.mark.parametrize("kind", in_turn("gguf"))
def test_a_model(rig_devices, kind, plan, source, folders):
    import torch
    from diffusers import FluxTransformer2DModel

    options, places = MAPS[plan]
    folder, expected = folders(kind, source), reference(kind, folders(kind, "fresh"))
    if refused := refusal(kind, plan, source):
        with pytest.raises(ValueError, match=refused):
            ALL_BACKENDS[kind](folders(kind, "fresh"), torch.bfloat16, **options)
        return
    if source == "fresh":
        model = ALL_BACKENDS[kind](folder, torch.bfloat16, **options)
    else:
        model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **options)
    found = {str(parameter.device) for parameter in model.parameters()}
    assert found <= places, f"weights on {found}"
    if plan == "per module":
        assert found == places
    if plan == "none":
        model.to("cuda:0")
    output = run(model)
    assert torch.equal(output, expected), f"off by {(output - expected).abs().max()}"


@pytest.mark.parametrize("plan", ["none", "auto", "balanced", "cuda:1", "dict of a number"])
@pytest.mark.parametrize("kind", ["bnb-nf4", "bnb-int8", "quanto-int8", "torchao-int8"])
def test_an_auto_model(rig_devices, kind, plan, folders):
    import torch
    from diffusers import AutoModel

    options, places = MAPS[plan]
    folder = folders(kind, "fresh")
    model = ALL_BACKENDS[kind](str(folder), torch.bfloat16, model_class=AutoModel, **options)
    found = {str(parameter.device) for parameter in model.parameters()}
    assert found <= places, f"weights on {found}"
    if plan == "none":
        model.to("cuda:0")
    assert torch.equal(run(model), reference(kind, folder))


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory):
    return models.saved(models.flux_pipeline(text=True), tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize("way", ["to", "model offload", "sequential", "balanced", "cuda"])
def test_a_pipeline_with_a_backend_for_each_component(rig_devices, pipeline_folder, way):
    import torch
    from diffusers import FluxPipeline, PipelineQuantizationConfig, QuantoConfig

    mapping = {
        "transformer": QuantoConfig(weights_dtype="int8"),
        "text_encoder": models.bnb_config("transformers", 8),
        "text_encoder_2": models.bnb_config("transformers", 4),
    }

    def load(**options):
        config = PipelineQuantizationConfig(quant_mapping=mapping)
        pipe = FluxPipeline.from_pretrained(
            pipeline_folder, quantization_config=config, torch_dtype=torch.float16, **options
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    expected = models.prompt_flux(load().to("cuda:0")).cpu()
    if way in ("balanced", "cuda"):
        pipe = load(device_map=way)
        assert not [name for name in mapping if name not in pipe.hf_device_map and way == "balanced"]
        places = {str(one.device) for name in mapping for one in getattr(pipe, name).parameters()}
        assert places <= {"cuda:0", "cuda:1"}, f"weights on {places}"
    else:
        pipe = load()
        PLACEMENTS[way](pipe, *rig_devices.devices)
    for _ in range(2):
        assert torch.equal(models.prompt_flux(pipe).cpu(), expected)
