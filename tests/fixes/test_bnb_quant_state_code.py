"""bnb-quant-state-code: QuantState.to leaves the code tensor on the old device."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit
from tests.rig import models

FIX_ID = "bnb-quant-state-code"
# TypeError before bitsandbytes 0.45.0, RuntimeError from then on.
SHOWS = r"(TypeError|RuntimeError): Input tensors need to be on the same GPU, but found the following tensor"
LEFT_BEHIND = r"weight\.quant_state\.code is on cuda:0, not on (cuda:1|cpu)"


def through_a_parent(layer, device):
    import torch

    return torch.nn.Sequential(layer).to(device)[0]


def directly(layer, device):
    return layer.to(device)


def two(gpu):
    """Two CUDA devices; these releases of bitsandbytes cannot run on the CPU."""
    if len(gpu.devices) < 2:
        pytest.skip("needs two CUDA devices")
    return gpu.pair


ways = pytest.mark.parametrize("move", [directly, through_a_parent])


@ways
@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_one_row_after_a_move(gpu, move, quant_type, double_quant):
    """One row takes the kernel that reads ``code``."""
    import torch

    here, there = two(gpu)
    reference = four_bit.run(four_bit.linear(here, quant_type, double_quant), here, rows=1)
    layer = move(four_bit.linear(here, quant_type, double_quant), there)
    with four_bit.current_device_kept():
        assert torch.equal(four_bit.run(layer, there, rows=1), reference)


@ways
@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=LEFT_BEHIND)
def test_every_tensor_of_the_quant_state_follows(gpu, move, quant_type, double_quant):
    here, there = two(gpu)
    layer = four_bit.linear(here, quant_type, double_quant)
    for device in (there, "cpu", here):
        layer = move(layer, device)
        four_bit.assert_whole(layer, device)
    four_bit.assert_whole(move(layer, there), there)


@pytest.mark.defect(FIX_ID, shows=LEFT_BEHIND)
def test_nothing_is_left_on_the_old_device(gpu):
    import torch

    here, there = two(gpu)
    four_bit.linear(here)  # what bitsandbytes keeps for itself on a device is there now
    before = gpu.allocated(here)
    model = four_bit.stack(here).to(there)
    assert torch.equal(
        model[0].weight.quant_state.code.cpu(), four_bit.linear(here).weight.quant_state.code.cpu()
    )
    left = gpu.allocated(here) - before
    four_bit.assert_whole(model, there)
    assert left == 0, f"{left} bytes stayed on {here}"


@pytest.mark.defect(FIX_ID, shows=LEFT_BEHIND)
def test_an_embedding_follows(gpu):
    import torch

    here, there = two(gpu)
    reference = four_bit.look_up(four_bit.embedding(here), here)
    model = four_bit.embedding(here).to(there)
    assert torch.equal(four_bit.look_up(model, there), reference)
    four_bit.assert_whole(model, there)


@pytest.mark.parametrize("double_quant", [False, True], ids=["", "double"])
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_pipeline_travels(gpu, tmp_path, double_quant):
    """A whole pipeline goes cuda:0, CPU, cuda:1 and runs there; its time embedding is a batch of one row."""
    import torch

    diffusers = pytest.importorskip("diffusers")
    here, there = two(gpu)
    folder = models.saved(models.flux_transformer(), tmp_path)

    def pipeline():
        transformer = models.load_quantized(
            diffusers.FluxTransformer2DModel, folder, bnb_4bit_use_double_quant=double_quant
        )
        return models.flux_pipeline(transformer)

    reference = models.call_flux(pipeline(), here).cpu()
    travelled = pipeline()
    travelled.to("cpu")
    travelled.to(there)
    with four_bit.current_device_kept():
        assert torch.equal(models.call_flux(travelled, there).cpu(), reference)
    four_bit.assert_whole(travelled.transformer, there)
    travelled.to(here)
    assert torch.equal(models.call_flux(travelled, here).cpu(), reference)


def test_a_state_without_code_moves(gpu):
    """``code`` is optional; states of blockwise quantization and of other tools may have none."""
    import torch
    from bitsandbytes.functional import QuantState

    state = QuantState(absmax=torch.zeros(1))
    if state.code is None and _upstream_reads_code():
        pytest.skip("bitsandbytes itself fails on a state without code from 0.45.3 on")
    state.to(gpu.devices[0])
    assert state.absmax.device == gpu.devices[0]


def _upstream_reads_code() -> bool:
    from bitsandbytes.functional import QuantState

    return not hasattr(QuantState.to, "__wrapped__")
