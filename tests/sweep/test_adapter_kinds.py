"""Every kind of adapter of peft, on every backend: its effect is that on the dequantized model, or there is an error.

The kinds are those of peft itself: one of a new release is tried with its default options, and fails here where that is
not enough.  What cannot work has its message here.
"""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models
from tests.fixes.merged import assert_same, bits, keep_compiler, layers_of
from tests.fixes.packing import keep_unpacked
from tests.gate import unmet

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(unmet("diffusers>=0.42")), reason="the sweep is about the newest releases"),
]

FEATURES = 64
# Options without which the adapter does not fit the layers, or is too small to be seen.
OPTIONS = {
    "ADALORA": {"total_step": 10, "init_r": 8},
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 100},
    "IA3": {"feedforward_modules": ["1"]},
    "OFT": {"r": 0, "oft_block_size": 16},
    "VBLORA": {"num_vectors": 8, "vector_length": 16},
}
NOT_FOR_A_LINEAR = {
    "ADAPTION_PROMPT": "is added to the attention of Llama",
    "CARTRIDGE": "is a prompt",
    "CPT": "is a prompt",
    "MULTITASK_PROMPT_TUNING": "is a prompt",
    "P_TUNING": "is a prompt",
    "PREFIX_TUNING": "is a prompt",
    "PROMPT_TUNING": "is a prompt",
    "SHADOW": "is added to a whole transformer",
    "TRAINABLE_TOKENS": "is for embeddings",
    "XLORA": "chooses among LoRAs of a language model",
}
NEEDS = {"ADAMSS": "sklearn"}
# Taken out, it rounds a bias, which is plain.
ROUNDS_AGAIN = {"BEFT"}
# Of these an argument of the call says which of several tasks a row is from.
TASKS = {"POLY"}

KINDS = [
    kind.value
    for kind in peft.PeftType
    if kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING and kind.value not in NOT_FOR_A_LINEAR
]

_NO_NUMBERS = "floating point"  # torch, when a parameter that is trained is made of packed bytes
_NO_OPERATION = "attempting to run unimplemented operator"  # torchao
# kind -> backend -> the message when it is added or first run.
FAILS: dict[str, dict[str, str]] = {
    "ADAMSS": {
        "nf4": "Sizes of tensors must match",
        "int8": _NO_NUMBERS,
        "gguf": "None",
        "torchao": _NO_OPERATION,
    },
    "DELORA": {"nf4": _NO_NUMBERS, "int8": _NO_NUMBERS, "gguf": _NO_NUMBERS, "torchao": _NO_OPERATION},
    "FROD": {
        "nf4": _NO_NUMBERS,
        "int8": _NO_NUMBERS,
        "gguf": _NO_NUMBERS,
        "quanto": "dtype of a weights Tensor cannot be changed",
        "torchao": _NO_OPERATION,
    },
    "GLORA": {
        "nf4": "is not a plain",
        "int8": "is not a plain",
        "gguf": "is not a plain",
        "quanto": "is not a plain",
        "torchao": _NO_OPERATION,
    },
    "HIRA": {"gguf": "size of tensor", "torchao": _NO_OPERATION},
    "HRA": {
        "nf4": "a 4-bit layer",
        "int8": "an 8-bit layer",
        "gguf": "a GGUF layer",
        "torchao": _NO_OPERATION,
    },
    "LN_TUNING": {"nf4": _NO_NUMBERS, "int8": _NO_NUMBERS, "gguf": _NO_NUMBERS},
    "OSF": {
        "nf4": "effective_rank",
        "int8": _NO_NUMBERS,
        "gguf": _NO_NUMBERS,
        "torchao": _NO_OPERATION,
    },
    "PEANUT": {
        "nf4": "a 4-bit layer",
        "int8": "an 8-bit layer",
        "gguf": "a GGUF layer",
        "torchao": _NO_OPERATION,
    },
    "PSOFT": {
        "nf4": "PSOFT init requires",
        "int8": "PSOFT init requires",
        "gguf": "PSOFT init requires",
        "torchao": _NO_OPERATION,
    },
    "SHIRA": {"gguf": "to have same size"},
    "SUPERTUNING": {
        "nf4": "must have the same dtype",
        "int8": "must have the same dtype",
        "gguf": "must have the same dtype",
        "torchao": _NO_OPERATION,
    },
    "TINYLORA": {"nf4": _NO_NUMBERS, "int8": _NO_NUMBERS, "gguf": _NO_NUMBERS, "torchao": _NO_OPERATION},
}


def plain_layers():
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(FEATURES, FEATURES) for _ in range(2)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def of_bitsandbytes(bits: int):
    import torch

    bnb = pytest.importorskip("bitsandbytes")
    model = plain_layers()
    for index, plain in enumerate(model):
        if bits == 8:
            layer = bnb.nn.Linear8bitLt(FEATURES, FEATURES, has_fp16_weights=False)
            weight = bnb.nn.Int8Params(plain.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(FEATURES, FEATURES, compute_dtype=torch.float32, quant_type="nf4")
            weight = bnb.nn.Params4bit(plain.weight.data.clone(), False, quant_type="nf4", module=layer)
        layer.weight, layer.bias = weight, plain.bias
        model[index] = layer
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model.to("cpu").requires_grad_(False)


def of_quanto():
    model, library = plain_layers(), quanto_models.quanto()
    library.quantize(model, weights=library.qint8)
    library.freeze(model)
    return model.requires_grad_(False)


def of_torchao():
    import torch

    if sentence := unmet("torchao>=0.18"):
        pytest.skip(sentence)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    class Config:
        @staticmethod
        def get_apply_tensor_subclass():
            return Int8WeightOnlyConfig()

    model = plain_layers()
    quantize_(model, Int8WeightOnlyConfig())
    model.hf_quantizer = type("Quantizer", (), {"quantization_config": Config})
    assert isinstance(model[0].weight, torch.nn.Parameter)
    return model


def of_gguf():
    import torch

    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind, model = gguf.GGMLQuantizationType.Q8_0, plain_layers()
    for index, plain in enumerate(model):
        layer = GGUFLinear(FEATURES, FEATURES, bias=True, compute_dtype=torch.float32)
        packed = torch.from_numpy(gguf.quants.quantize(plain.weight.numpy(), kind))
        layer.weight, layer.bias = GGUFParameter(packed, quant_type=kind), plain.bias
        model[index] = layer
    return model.requires_grad_(False)


# How much of the effect the output may be off: kernels that round the input; merging rounds the sum.
WEIGHTS = {
    "nf4": (lambda: of_bitsandbytes(4), 0.03, 0.6),
    "int8": (lambda: of_bitsandbytes(8), 0.05, 0.1),
    "quanto": (of_quanto, 1e-4, 0.1),
    "torchao": (of_torchao, 1e-4, 0.1),
    "gguf": (of_gguf, 1e-4, 0.1),
}


def dequantized(model):
    """Plain layers with the weights that the kernels of ``model`` multiply with."""
    import torch
    from peft.utils.integrations import dequantize_bnb_weight

    plain = plain_layers()
    for layer, packed in zip(plain, model, strict=True):
        weight, kind = packed.weight, type(packed.weight).__name__
        if kind == "GGUFParameter":
            from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

            values = dequantize_gguf_tensor(weight)
        elif kind in ("Params4bit", "Int8Params"):
            state = weight.quant_state if kind == "Params4bit" else packed.state
            if kind == "Int8Params":
                state.SCB = weight.SCB if state.SCB is None else state.SCB
            values = dequantize_bnb_weight(weight, state)
        else:
            values = weight.dequantize()
        with torch.no_grad():
            layer.weight.copy_(values.float())
    return plain


def adapted(model, kind: str):
    import torch

    torch.manual_seed(1)
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]]
    return peft.get_peft_model(model, config(target_modules=["0", "1"], **OPTIONS.get(kind, {}))).eval()


def run(model, kind: str = ""):
    """Without a ``kind`` it is a model without an adapter."""
    import torch

    generator = torch.Generator().manual_seed(5)
    given = torch.randn(4, FEATURES, generator=generator)
    with torch.no_grad():
        if kind in TASKS:
            tasks = torch.zeros(len(given), dtype=torch.long)
            return model.base_model(given[:, None], task_ids=tasks).float()[:, 0]
        return model(given).float()


def own_tensors(model) -> dict:
    """Those of the adapter, by name: not those of the layers below, nor LN tuning's copies of these."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: tensor
        for name, tensor in found.items()
        if "base_layer" not in name and not name.endswith("ln_tuning_layers.default.weight")
    }


def make_matter(plain, kind: str, without) -> float:
    """Give the adapter of a plain model values whose effect is as large as the output; how large it is then."""
    import torch

    trained = [one for one in own_tensors(plain).values() if one.requires_grad]
    start = [one.detach().clone() for one in trained]
    for scale in (0.03, 0.1, 0.3, 1, 3, 10, 30):
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for one, value in zip(trained, start, strict=True):
                one.copy_(value + scale * torch.randn(one.shape, generator=generator))
        effect = float((run(plain, kind) - without).abs().max())
        if effect > 0.5 * without.abs().max():
            return effect
    raise AssertionError(f"{kind} has no effect on plain layers; it has to be classified in {__file__}")


def compared(kind: str, weights: str):
    """A quantized model with an adapter, the outputs that it should have, and the size of the adapter's effect.

    None where it cannot be added, or run, with the message of `FAILS`.
    """
    import torch

    make, tolerance, _ = WEIGHTS[weights]
    model = make()
    plain = dequantized(model)
    without = run(plain)
    plain = adapted(plain, kind)
    fails = FAILS.get(kind, {}).get(weights)
    if fails:
        with pytest.raises((KeyError, RuntimeError, TypeError, ValueError), match=fails):
            run(adapted(model, kind), kind)
        return None
    model = adapted(model, kind)
    off = float((run(model, kind) - run(plain, kind)).abs().max())
    assert off < tolerance * without.abs().max(), f"fresh, the output is off by {off:.2g}"
    effect = make_matter(plain, kind, without)
    own, expected = own_tensors(model), run(plain, kind)
    values = own_tensors(plain)
    with torch.no_grad():
        for name, value in values.items():
            assert own[name].dtype == value.dtype, f"{name} is {own[name].dtype}"
            own[name].copy_(value)
    return model, expected, effect


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, side):
    keep_compiler(monkeypatch)
    if side == "bare":
        keep_unpacked(monkeypatch)


def test_every_kind_is_known():
    known = {kind.value for kind in peft.PeftType}
    tables = (OPTIONS, NOT_FOR_A_LINEAR, NEEDS, FAILS)
    assert {kind for table in tables for kind in table} | TASKS <= known
    assert not NOT_FOR_A_LINEAR.keys() & FAILS.keys()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("adapter", KINDS)
def test_kind(adapter, weights):
    import torch

    kind = adapter
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    found = compared(kind, weights)
    if found is None:
        return
    model, expected, effect = found
    _, tolerance, merged_tolerance = WEIGHTS[weights]
    output = run(model, kind)
    off = float((output - expected).abs().max()) / effect
    assert off < tolerance, f"the output is off by {off:.0%} of the effect"
    before = bits(model)
    try:
        model.merge_adapter()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        assert not any(getattr(layer, "merged", False) for layer in layers_of(model))
        assert torch.equal(run(model, kind), output), "it was merged in part"
        return
    off = float((run(model, kind) - expected).abs().max()) / effect
    assert off < merged_tolerance, f"merged, the output is off by {off:.0%} of the effect"
    model.unmerge_adapter()
    off = float((run(model, kind) - output).abs().max()) / effect
    assert off < merged_tolerance, f"unmerged, the output is off by {off:.0%} of the effect"
    if kind not in ROUNDS_AGAIN:
        assert_same(bits(model), before)
