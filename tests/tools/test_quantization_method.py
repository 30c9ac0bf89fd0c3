"""One way to read a quantization method, from whatever states it."""

from __future__ import annotations

import types

import pytest

from diffusers_quantfix.weights.method import method_of


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_config_with_a_function_of_that_name(library, bits):
    """Their ``quantization_method()`` says "nf4"; ``quant_method`` is what is meant."""
    module = pytest.importorskip(library)
    pytest.importorskip("bitsandbytes")
    config = module.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    assert callable(config.quantization_method)
    assert method_of(config) == "bitsandbytes"


def test_a_model_a_text_and_nothing():
    assert method_of(types.SimpleNamespace(quantization_method="quanto")) == "quanto"
    assert method_of(types.SimpleNamespace(quant_method="gguf")) == "gguf"
    assert method_of(None) == ""
