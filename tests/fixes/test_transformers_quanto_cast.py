"""transformers-quanto-cast: a cast of a quanto model of transformers fails midway and leaves it half cast."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

torch = pytest.importorskip("torch")

FIX_ID = "transformers-quanto-cast"
REFUSED = r"cannot be cast from torch.float16 to \S+; nothing was changed"
CASTS = {
    "to(dtype)": lambda model, dtype: model.to(dtype),
    "to(dtype=)": lambda model, dtype: model.to(dtype=dtype),
    "to(device, dtype)": lambda model, dtype: model.to("cpu", dtype),
    "to(tensor)": lambda model, dtype: model.to(torch.zeros(1, dtype=dtype)),
    "type": lambda model, dtype: model.type(dtype),
}
NAMED = {"bfloat16": torch.bfloat16, "double": torch.float64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.rig import models

    return models.saved(models.t5_encoder(), tmp_path_factory.mktemp("t5"))


def dtypes(model) -> dict:
    return {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("weights", ["int8", "float8", "int4", "int2"])
@pytest.mark.parametrize("how", [*CASTS, *NAMED])
@pytest.mark.defect(FIX_ID, shows=r"cannot be changed|DID NOT RAISE")
def test_nothing_is_changed(folder, weights, how):
    model = q.load_t5(folder, weights)
    before, reference = dtypes(model), q.run_t5(model)
    for dtype in [NAMED[how]] if how in NAMED else [torch.bfloat16, torch.float64]:
        with pytest.raises(ValueError, match=REFUSED):
            getattr(model, how)() if how in NAMED else CASTS[how](model, dtype)
        assert dtypes(model) == before
        assert torch.equal(q.run_t5(model), reference)


def test_its_own_dtype_is_none(folder):
    """Also under a subclass of the model, and with a device alone."""
    # In float16 T5 keeps some of its plain weights in float32, and ``to`` casts those of every model.
    model = q.load_t5(folder, "int8", torch.bfloat16)
    model.__class__ = type("Mine", (type(model),), {})
    reference = q.run_t5(model)
    for cast in CASTS.values():
        cast(model, torch.bfloat16)
    model.bfloat16()
    model.to("cpu")
    assert torch.equal(q.run_t5(model), reference)


def test_a_plain_model_is_cast():
    from tests.rig import models

    for how in ("bfloat16", "double"):
        model = models.t5_encoder()
        assert getattr(model, how)().dtype == NAMED[how]
        assert CASTS["type"](model, torch.float16).dtype == torch.float16


def test_a_dequantized_model_is_cast(folder):
    model = q.load_t5(folder, "int8")
    if not hasattr(model, "dequantize"):
        pytest.skip("this transformers has no dequantize()")
    try:
        model.dequantize()
    except NotImplementedError:
        pytest.skip("quanto's dequantize() is not known here")
    assert model.bfloat16().dtype == torch.bfloat16
