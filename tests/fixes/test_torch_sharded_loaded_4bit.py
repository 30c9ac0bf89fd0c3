"""torch-sharded-loaded-4bit: FSDP loses the quant states of a model that diffusers loaded in 4 bits."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types

import pytest

from diffusers_quantfix.engine.errors import TargetMissing
from diffusers_quantfix.engine.probe import function_of
from diffusers_quantfix.fixes.torch import sharded_loaded_four_bit
from diffusers_quantfix.verify.models.fully_sharded import take_apart
from tests.fixes import four_bit
from tests.gate import unmet
from tests.rig import models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("bitsandbytes")

FIX_ID = "torch-sharded-loaded-4bit"
SHOWS = (
    # bitsandbytes 0.50, and before: without a word
    r"quant_state is required|AssertionError:?\s*$"
    # A float storage cannot even be loaded before: diffusers-4bit-storage
    r"|Expected the flattened shape of the current param \(context_embedder\.weight\)"
    # torch 2.11 and older shard floats only
    r"|only Tensors of floating point dtype can require gradients"
)
STORAGES = pytest.mark.parametrize("storage", ["float32", "bfloat16"])


@pytest.fixture
def group():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loaded(tmp_path, storage, device, again=True):
    """A tiny Flux transformer on ``device``: from a 4-bit checkpoint, or quantized while it is loaded."""
    kind, plain, packed = diffusers.FluxTransformer2DModel, tmp_path / "plain", tmp_path / "packed"
    storage = getattr(torch, storage)
    dtype = storage if storage.is_floating_point else torch.float32
    models.saved(models.flux_transformer(), plain)
    model = four_bit.load(
        kind, plain, dtype=dtype, bnb_4bit_quant_storage=storage, bnb_4bit_compute_dtype=dtype
    )
    if again:
        models.saved(model, packed)
        with four_bit.skip_for_other_reasons():
            model = kind.from_pretrained(packed, torch_dtype=dtype)
    # In training mode a CPU with AVX512-BF16 does not repack.
    return model.to(device).train()


def run(model, device):
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 4, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 64, generator=generator),
        "pooled_projections": torch.randn(1, 64, generator=generator),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    with torch.no_grad():
        return model(**{name: tensor.to(device, dtype) for name, tensor in inputs.items()}).sample.cpu()


@pytest.fixture
def data_parallel(gpu, group):
    """``FullyShardedDataParallel`` of a model over the group, taken apart afterwards.

    A parameter and its views own each other in C++, which no garbage collection sees.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    made = []

    def shard(model, device):
        made.append(FullyShardedDataParallel(model, use_orig_params=True, device_id=device.index))
        return made[-1]

    yield shard
    for sharded in made:
        take_apart(sharded)


@STORAGES
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_fully_sharded_data_parallel(gpu, data_parallel, tmp_path, storage):
    here = gpu.devices[0]
    model = loaded(tmp_path, storage, here)
    expected = run(model, here)
    sharded = data_parallel(model, here)
    for _ in range(2):
        assert torch.equal(run(sharded, here), expected)


@pytest.mark.parametrize("storage", ["uint8", "float32", "bfloat16"])
@pytest.mark.parametrize("how", ["blocks", "list", "keyword"])
@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="torch>=2.8")
def test_fully_shard(gpu, group, tmp_path, storage, how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if sentence := unmet("bitsandbytes>=0.46" if storage == "uint8" else "bitsandbytes>=0.47"):
        pytest.skip(
            f"4-bit layers run on the CPU from 0.46 on, with a float storage from 0.47 on; {sentence}"
        )
    if torch.version.cuda and gpu.kind == "rig":
        pytest.skip("a torch that is built for CUDA asks NCCL, which the rig keeps out")
    mesh = init_device_mesh("cpu", (1,))
    model = loaded(tmp_path, storage, "cpu")
    expected = run(model, "cpu")
    if how == "list":
        fully_shard(list(model.transformer_blocks), mesh=mesh)
    elif how == "blocks":
        for block in model.transformer_blocks:
            fully_shard(block, mesh=mesh)
    sharded = fully_shard(module=model, mesh=mesh) if how == "keyword" else fully_shard(model, mesh=mesh)
    assert sharded is model
    for _ in range(2):
        assert torch.equal(run(model, "cpu"), expected)


def test_what_was_quantized_while_loaded_is_left_alone(gpu, data_parallel, tmp_path):
    here = gpu.devices[0]
    model = loaded(tmp_path, "float32", here, again=False)
    expected = run(model, here)
    states = [layer.quant_state for layer in four_bit.layers_of(model)]
    assert None not in states
    sharded = data_parallel(model, here)
    assert [id(layer.quant_state) for layer in four_bit.layers_of(model)] == [id(one) for one in states]
    assert torch.equal(run(sharded, here), expected)


def test_a_plain_model(gpu, data_parallel):
    here = gpu.devices[0]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(here)
    inputs = torch.ones(1, 8, device=here)
    expected = model(inputs)
    sharded = data_parallel(model, here)
    assert torch.equal(sharded(inputs), expected)
    assert not any("quant_state" in vars(layer) for layer in model)


LOADER = "diffusers.quantizers.bitsandbytes.bnb_quantizer"
QUANTIZER = """
class BnB4BitDiffusersQuantizer:
    def create_quantized_param(self, model, value, name, device, state_dict, unexpected_keys=None):
        module = model.get_submodule(name)
        return Params4bit.from_prequantized(data=value, quantized_stats={}, device=device%s)
"""
NAMES_THE_LAYER = ", module=module"


@pytest.fixture
def fsdp():
    """A stand-in for ``torch.distributed.fsdp`` that nobody has patched."""

    class FullyShardedDataParallel:
        def __init__(self, module):
            self.module = module

    return types.SimpleNamespace(FullyShardedDataParallel=FullyShardedDataParallel)


def create_of(text):
    held = {}
    exec(text, held)
    return held["BnB4BitDiffusersQuantizer"].create_quantized_param


@pytest.mark.parametrize("named", ["", NAMES_THE_LAYER], ids=["affected", "fixed"])
def test_the_probe_reads_below_wrappers(fsdp, monkeypatch, named):
    """As those of diffusers-4bit-storage and diffusers-4bit-load-scan; the wrapper's own code says the opposite."""
    loader = pytest.importorskip(LOADER)
    original = create_of(QUANTIZER % named)
    opposite = create_of(QUANTIZER % ("" if named else NAMES_THE_LAYER))
    monkeypatch.setattr(
        loader.BnB4BitDiffusersQuantizer, "create_quantized_param", functools.wraps(original)(opposite)
    )
    assert sharded_loaded_four_bit.broken(fsdp) is not bool(named)


def test_the_probe_reads_code_of_diffusers(fsdp, monkeypatch):
    """The same in memory, where other fixes of ours are around it, and on disk."""
    loader = pytest.importorskip(LOADER)
    create = vars(loader.BnB4BitDiffusersQuantizer)["create_quantized_param"]
    assert function_of(create).__code__.co_filename == loader.__file__
    expected = sharded_loaded_four_bit.broken(fsdp)
    monkeypatch.delitem(sys.modules, LOADER)
    assert sharded_loaded_four_bit._code_on_disk().co_filename == loader.__file__
    assert sharded_loaded_four_bit.broken(fsdp) is expected


@pytest.mark.parametrize("named", ["", NAMES_THE_LAYER, None], ids=["affected", "fixed", "no such file"])
def test_a_loader_that_is_not_imported_is_read_on_disk(fsdp, monkeypatch, tmp_path, named):
    folder = tmp_path / "diffusers" / "quantizers" / "bitsandbytes"
    folder.mkdir(parents=True)
    if named is not None:
        # It could not be imported.
        (folder / "bnb_quantizer.py").write_text("import no_such_module\n" + QUANTIZER % named)
    package = types.ModuleType("diffusers")
    package.__spec__ = importlib.util.spec_from_loader("diffusers", None, is_package=True)
    package.__spec__.submodule_search_locations = [str(tmp_path / "diffusers")]
    monkeypatch.setitem(sys.modules, "diffusers", package)
    monkeypatch.delitem(sys.modules, LOADER, raising=False)
    if named is None:
        with pytest.raises(TargetMissing, match=f"there is no {LOADER}"):
            sharded_loaded_four_bit.broken(fsdp)
    else:
        assert sharded_loaded_four_bit.broken(fsdp) is not bool(named)
    assert LOADER not in sys.modules
