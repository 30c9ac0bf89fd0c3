"""A tokenizer that was loaded with the quantization config of the models is saved."""

from __future__ import annotations


def case(work: str) -> str | None:
    from diffusers import BitsAndBytesConfig
    from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(f"{work}/tokenizer")
    name = "pretrained_model_name_or_path"
    place = name if name in ComponentSpec.__dataclass_fields__ else "repo"  # up to diffusers 0.35
    spec = ComponentSpec(name="tokenizer", type_hint=PreTrainedTokenizerFast, **{place: f"{work}/tokenizer"})
    spec.load(quantization_config=BitsAndBytesConfig(load_in_8bit=True)).save_pretrained(f"{work}/saved")
    return "the tokenizer is saved"
