"""Quantizers of diffusers about which no fix is: the tools know their tensors, and they move whole.

BFL's needs no library of its own. The tests of sdnq and of auto-round run where these are installed: in an environment
of its own (``pip install sdnq auto-round`` beside what the README installs),
``python -m pytest tests/tools/test_other_quantizers.py``.
"""

from __future__ import annotations

import sys

import pytest

import diffusers_quantfix
from diffusers_quantfix.advisories import quantizers
from tests.fixes import lora_models as lora
from tests.gate import unmet
from tests.rig import models

pytestmark = pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="needs diffusers 0.42")

BACKENDS = ["bfl-fp8r", "bfl-nvfp4", "sdnq-uint4", "autoround-4"]


def bfl(folder, kind: str):
    """A file as BFL publishes them: it has the scales of each weight beside it."""
    import safetensors.torch
    import torch
    from diffusers import BFLQuantizationConfig, FluxTransformer2DModel
    from diffusers.quantizers.bfl import utils

    tensors = models.flux_transformer().bfloat16().state_dict()
    for name, tensor in list(tensors.items()):
        if "transformer_blocks" not in name or tensor.ndim != 2:
            continue
        layer = name.removesuffix(".weight")
        if kind == "fp8r":
            packed, tensors[f"{layer}.weight_scale"] = utils.quantize_fp8r(tensor)
        else:
            packed, tensors[f"{layer}.weight_scale"], scale = utils.quantize_nvfp4(tensor)
            tensors[f"{layer}.weight_scale_2"], tensors[f"{layer}.input_scale"] = scale, torch.ones(())
        tensors[name] = packed
    file = folder / f"{kind}.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return FluxTransformer2DModel.from_single_file(
        str(file), config=str(folder), quantization_config=BFLQuantizationConfig(), torch_dtype=torch.bfloat16
    )


def sdnq(folder, kind: str):
    import torch
    from diffusers import FluxTransformer2DModel

    pytest.importorskip("sdnq")
    from diffusers import SDNQConfig

    return FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=SDNQConfig(weights_dtype=kind), torch_dtype=torch.bfloat16
    )


def autoround(folder, kind: str):
    """A checkpoint as AutoRound writes them, of weights that are rounded to the nearest."""
    import json

    import safetensors.torch
    import torch
    from diffusers import FluxTransformer2DModel

    linear = pytest.importorskip("auto_round_extension.torch.qlinear_torch", reason="needs auto-round")
    group, model = 32, models.flux_transformer().half()
    tensors = model.state_dict()
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or "transformer_blocks" not in name:
            continue
        rows = layer.weight.data.float().view(layer.out_features, -1, group)
        scales = (rows.abs().amax(-1) / 7).clamp(min=1e-6)
        packed = linear.QuantLinear(
            int(kind), group, layer.in_features, layer.out_features, layer.bias is not None
        )
        packed.device = "cpu"  # it is asked for, and not set
        packed.pack(layer.float(), scales, torch.full_like(scales, 8), None, device="cpu")
        tensors = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] != name}
        tensors.update({f"{name}.{key}": tensor.contiguous() for key, tensor in packed.state_dict().items()})
    place = folder / "autoround"
    place.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, place / "diffusion_pytorch_model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "auto-round", "bits": int(kind), "group_size": group, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "backend": "torch",
        "block_name_to_quantize": "transformer_blocks,single_transformer_blocks",
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    return FluxTransformer2DModel.from_pretrained(place, torch_dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


@pytest.fixture(params=BACKENDS)
def pipe(request, folder):
    library, _, kind = request.param.partition("-")
    return models.flux_pipeline({"bfl": bfl, "sdnq": sdnq, "autoround": autoround}[library](folder, kind))


def run(pipe, device):
    import torch

    return models.call_flux(pipe, device=device, dtype=torch.bfloat16).cpu()


def size_of(model) -> int:
    return sum(one.nbytes for one in (*model.parameters(), *model.buffers()))


def test_the_tools_count_it_and_it_moves(rig_devices, pipe):
    import torch

    here, there = rig_devices.devices
    size = size_of(pipe.transformer)
    reference = run(pipe.to(here), here)
    assert torch.isfinite(reference).all()
    assert rig_devices.allocated(here) >= size
    diffusers_quantfix.audit(pipe).raise_if_misplaced()
    plain = [value for part in pipe.transformer.modules() for value in vars(part).values()]
    attributes = sum(isinstance(value, torch.Tensor) for value in plain)
    del plain  # which has the layers' dicts of parameters
    count = len([*pipe.transformer.parameters(), *pipe.transformer.buffers()]) + attributes
    count += 2  # of the scheduler
    assert f"{count} tensors" in str(diffusers_quantfix.audit(pipe))
    assert torch.equal(run(pipe.to(there), there), reference)
    with diffusers_quantfix.track(pipe) as tracked:
        run(pipe, there)
    assert tracked.peak[str(there)] >= size
    before = rig_devices.allocated(there)
    diffusers_quantfix.release(pipe)
    assert before - rig_devices.allocated(there) >= size - 1024, "bytes left"
    assert rig_devices.allocated(here) < size / 100, "bytes left"


@pytest.mark.parametrize("offload", ["model", "sequential", "leaf", "leaf with a stream", "block"])
def test_offload_is_exact_and_leaves_nothing(rig_devices, pipe, offload):
    import torch

    here = rig_devices.devices[0]
    reference = run(pipe.to(here), here)
    pipe.to("cpu")
    before = rig_devices.allocated(here)
    if offload in ("model", "sequential"):
        getattr(pipe, f"enable_{offload}_cpu_offload")(device="cuda")
    else:
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cuda"),
            offload_type="block_level" if offload == "block" else "leaf_level",
            use_stream="stream" in offload,
            **({"num_blocks_per_group": 1} if offload == "block" else {}),
        )
    for _ in range(2):
        assert torch.equal(run(pipe, here), reference)
    if offload == "model":
        pipe.maybe_free_model_hooks()
    assert rig_devices.allocated(here) - before < 1024, "bytes left"


# What upstream itself refuses of a LoRA, before it changes anything.
NOT_LOADED = {"bfl-nvfp4": "Only Tensors of floating point and complex dtype can require gradients"}
NOT_FUSED = {"bfl-fp8r": "Promotion for Float8 Types is not supported"}


def test_a_lora_loaded_and_unloaded_leaves_what_was(request, pipe):
    import torch

    pytest.importorskip("peft", reason="peft is not installed")
    backend = request.node.callspec.params["pipe"]
    without = run(pipe, "cpu")
    if backend in NOT_LOADED:
        with pytest.raises(RuntimeError, match=NOT_LOADED[backend]):
            lora.load(pipe, "one")
    else:
        lora.load(pipe, "one")
        with_lora = run(pipe, "cpu")
        assert lora.distance(with_lora, without) > 0.01
        if backend in NOT_FUSED:
            with pytest.raises(RuntimeError, match=NOT_FUSED[backend]):
                pipe.fuse_lora(components=["transformer"])
            assert torch.equal(run(pipe, "cpu"), with_lora)
        pipe.unload_lora_weights()
    assert torch.equal(run(pipe, "cpu"), without)


@pytest.mark.parametrize("kind", ["uint4", "int8"])
def test_sdnq_quantizes_anew_what_is_fused_and_unfused(folder, kind):
    """The same with and without this package: the weights are off by rounding, once, and not more each time."""
    import torch

    pytest.importorskip("peft", reason="peft is not installed")
    pipe = lora.load(models.flux_pipeline(sdnq(folder, kind)), "one")
    with_lora = run(pipe, "cpu")
    outputs = []
    for _ in range(2):
        pipe.fuse_lora(components=["transformer"])
        outputs.append(run(pipe, "cpu"))
        pipe.unfuse_lora(components=["transformer"])
        outputs.append(run(pipe, "cpu"))
    assert all(0 < (one - with_lora).norm() < 0.01 * with_lora.norm() for one in outputs)
    assert torch.equal(outputs[1], outputs[3])


def test_every_quantizer_of_diffusers_is_known():
    """A new one fails here until somebody has looked at what the tools make of it."""
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    new = sorted(set(AUTO_QUANTIZER_MAPPING) - set(quantizers.PATCHED) - set(quantizers.OTHERS))
    assert not new, f"look at {new}, and list them in advisories/quantizers.py"


def test_doctor_names_what_this_release_can_use():
    """Also the methods whose code diffusers has itself; the others where their library is installed."""
    import importlib.metadata

    said = " ".join(quantizers.advice())
    release = f"diffusers {importlib.metadata.version('diffusers')}: no fix is about the quantization method"
    assert f"{release} 'bfl'" in said
    assert f"{release} 'nunchaku_lite'" in said
    for method in ("auto-round", "modelopt", "sdnq"):
        assert (repr(method) in said) == (not unmet(quantizers.OTHERS[method][0])), method


def test_an_older_release_has_none_of_them(monkeypatch, tmp_path):
    (tmp_path / "diffusers" / "quantizers" / "gguf").mkdir(parents=True)
    (tmp_path / "diffusers" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "diffusers", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(quantizers, "installed_version", {"diffusers": "0.35.2"}.get)
    assert list(quantizers.advice()) == []
