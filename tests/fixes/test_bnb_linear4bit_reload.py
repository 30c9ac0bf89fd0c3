"""bnb-linear4bit-reload: a 4-bit layer cannot load its own state dict."""

from __future__ import annotations

import pytest

from tests.fixes import four_bit

FIX_ID = "bnb-linear4bit-reload"
SHOWS = r"Unexpected key\(s\) in state_dict: .*weight\.absmax"
LOST = r"Unexpected key\(s\) in state_dict: .*weight\.absmax|is a Parameter"


@four_bit.quantizations
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_takes_the_state_dict_of_another(gpu, quant_type, double_quant):
    import torch

    here = gpu.devices[0]
    source = four_bit.stack(here, quant_type, double_quant)
    saved, reference = four_bit.state_of(source), four_bit.run(source, here)
    model = torch.nn.Sequential(*(four_bit.linear(here, quant_type, double_quant, seed=9) for _ in range(2)))
    model.insert(1, torch.nn.LayerNorm(four_bit.FEATURES, device=here))
    four_bit.run(model, here)
    weights, states = (
        [layer.weight for layer in (model[0], model[2])],
        [model[0].quant_state, model[2].quant_state],
    )
    before = gpu.allocated(here)
    answer = model.load_state_dict(saved)
    assert not answer.missing_keys and not answer.unexpected_keys
    assert gpu.allocated(here) <= before
    assert model[0].weight is weights[0] and model[2].quant_state is states[1]
    four_bit.assert_whole(model, here)
    assert not four_bit.differences(saved, four_bit.state_of(model))
    for _ in range(2):
        assert torch.equal(four_bit.run(model, here), reference)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
@pytest.mark.parametrize("mode", ["no_grad", "grad"])
def test_its_own_state_dict(gpu, mode):
    import torch

    here = gpu.devices[0]
    model = four_bit.stack(here, double_quant=True)
    reference = four_bit.run(model, here)
    with torch.set_grad_enabled(mode == "grad"):
        model.load_state_dict(model.state_dict())
    assert torch.equal(four_bit.run(model, here), reference)


@pytest.mark.defect(FIX_ID, shows=LOST)
def test_assign_leaves_the_class(gpu):
    import torch

    here = gpu.devices[0]
    source = four_bit.linear(here, double_quant=True)
    saved = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    reference = four_bit.run(source, here)
    model = four_bit.linear(here, double_quant=True, seed=5)
    four_bit.run(model, here)
    model.load_state_dict(saved, assign=True)
    assert type(model.weight).__name__ == "Params4bit", f"the weight is a {type(model.weight).__name__}"
    assert model.weight.data_ptr() == saved["weight"].data_ptr()
    four_bit.assert_whole(model, here)
    assert torch.equal(four_bit.run(model, here), reference)
    assert torch.equal(four_bit.run(model.to("cpu").to(here), here), reference)


@pytest.mark.defect(FIX_ID, shows=LOST)
def test_assign_of_full_weights_is_quantized_by_the_first_move(gpu):
    import torch
    from bitsandbytes.nn import Linear4bit

    here = gpu.devices[0]
    torch.manual_seed(0)
    plain = torch.nn.Linear(four_bit.FEATURES, four_bit.FEATURES)
    model = Linear4bit(four_bit.FEATURES, four_bit.FEATURES, compute_dtype=torch.float32, quant_type="nf4")
    model.load_state_dict(plain.state_dict(), assign=True)
    assert type(model.weight).__name__ == "Params4bit", f"the weight is a {type(model.weight).__name__}"
    model = model.to(here)
    four_bit.assert_whole(model, here)
    expected = Linear4bit(four_bit.FEATURES, four_bit.FEATURES, compute_dtype=torch.float32, quant_type="nf4")
    expected.load_state_dict(plain.state_dict())
    assert torch.equal(four_bit.run(model, here), four_bit.run(expected.to(here), here))


def test_another_type_and_nesting_are_taken_over(gpu):
    import torch

    here = gpu.devices[0]
    source = four_bit.linear(here, "fp4", True)
    model = four_bit.linear(here, "nf4", False, seed=3)
    four_bit.run(model, here)
    model.load_state_dict(four_bit.state_of(source))
    assert torch.equal(four_bit.run(model, here), four_bit.run(source, here))
    assert (model.weight.quant_type, model.weight.compress_statistics) == ("fp4", True)


def test_a_copy_of_the_model_keeps_its_own(gpu):
    import copy

    import torch

    here = gpu.devices[0]
    model = four_bit.stack(here)
    other, reference = copy.deepcopy(model), four_bit.run(model, here)
    model.load_state_dict(four_bit.state_of(four_bit.stack(here, layers=2, double_quant=False)))
    source = four_bit.linear(here, seed=8)
    model[0].load_state_dict(four_bit.state_of(source))
    assert torch.equal(four_bit.run(other, here), reference)
    assert not torch.equal(four_bit.run(model, here), reference)


def test_what_does_not_fit_is_refused_and_nothing_is_changed(gpu):
    import torch
    from bitsandbytes.nn import Linear4bit

    here = gpu.devices[0]
    model = four_bit.linear(here)
    reference = four_bit.run(model, here)
    larger = Linear4bit(four_bit.FEATURES, 2 * four_bit.FEATURES, bias=False, quant_type="nf4").to(here)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(larger.state_dict(), strict=False)
    assert torch.equal(four_bit.run(model, here), reference)
    fresh = Linear4bit(four_bit.FEATURES, four_bit.FEATURES, quant_type="nf4")
    with pytest.raises(RuntimeError, match="size mismatch"):
        fresh.load_state_dict(model.state_dict())


def test_other_parts_of_a_model_are_loaded_as_before(gpu):
    """As PEFT loads a LoRA: through the whole model, with nothing for its 4-bit layers."""
    import torch

    here = gpu.devices[0]
    model = four_bit.stack(here)
    state, absmax = model[0].quant_state, model[0].quant_state.absmax
    model.load_state_dict({"1.weight": torch.full((four_bit.FEATURES,), 2.0)}, strict=False)
    assert float(model[1].weight[0]) == 2.0
    assert model[0].quant_state is state and state.absmax is absmax


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs="bitsandbytes>=0.46")
def test_on_a_machine_without_gpu():
    """Where a CPU with AVX512-BF16 repacks the bytes in the first run."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        source, model = four_bit.linear("cpu", seed=1), four_bit.linear("cpu", seed=2)
        saved = four_bit.state_of(source)
        for dtype in (torch.float32, torch.bfloat16):
            inputs = four_bit.batch("cpu").to(dtype)
            reference = source(inputs)
            model(inputs)
            model.load_state_dict(saved)
            assert torch.equal(model(inputs), reference)
            model.load_state_dict(four_bit.state_of(four_bit.linear("cpu", seed=2)))


@pytest.mark.defect(FIX_ID, shows=SHOWS, needs=("bitsandbytes>=0.46", "peft"))
def test_a_resumed_qlora_run_continues_bit_by_bit(tmp_path):
    """Accelerator.save_state, a new model in a new accelerator, load_state: the same losses and weights."""
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    def start(seed):
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(
            *(four_bit.linear("cpu", double_quant=True, seed=seed + i) for i in range(2))
        )
        torch.manual_seed(seed)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "1"], lora_dropout=0.1)).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        return (accelerator, *accelerator.prepare(model, optimizer))

    def train(accelerator, model, optimizer, first, last):
        losses = []
        for step in range(first, last):
            inputs = torch.randn(4, four_bit.FEATURES, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    run = start(seed=0)
    train(*run, 0, 3)
    run[0].save_state(tmp_path / "checkpoint")
    expected = train(*run, 3, 6)
    resumed = start(seed=7)
    train(*resumed, 0, 2)
    resumed[0].load_state(tmp_path / "checkpoint")
    assert train(*resumed, 3, 6) == expected
    assert not four_bit.differences(run[1].state_dict(), resumed[1].state_dict())
