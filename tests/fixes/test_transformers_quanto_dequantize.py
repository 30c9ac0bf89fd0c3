"""transformers-quanto-dequantize: models of transformers that quanto quantized cannot be dequantized."""

from __future__ import annotations

import pytest

from tests.fixes import quanto_models as q

FIX_ID = "transformers-quanto-dequantize"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.rig import models

    return models.saved(models.t5_encoder(), tmp_path_factory.mktemp("t5"))


@pytest.mark.defect(FIX_ID, shows=r"has no implementation of `dequantize`")
def test_a_model_is_dequantized(folder):
    q.quanto()
    for weights in ("float8", "int4"):
        model = q.load_t5(folder, weights)
        reference = q.run_t5(model)
        model.dequantize()
        assert not [name for name, layer in model.named_modules() if type(layer).__name__ == "QLinear"]
        assert q.error(q.run_t5(model), reference) < 0.005
