"""A modular pipeline whose models were quantized by one config cannot be saved.

Symptom: TypeError "Object of type BitsAndBytesConfig is not JSON serializable" from ``save_pretrained`` of a modular
    pipeline after ``load_components(quantization_config=config)``.
Cause: ``load_components`` passes one config for all on to every component. A tokenizer keeps what it does not know, and
    saves it. ``ComponentSpec.load`` holds back the dtype for this reason, but not the config.
Upstream: not reported; diffusers/modular_pipelines/modular_pipeline_utils.py.
Patch: it is not passed to a tokenizer or processor of transformers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import names_used, resolve

FIX = Fix(
    __doc__,
    id="diffusers-modular-tokenizer-config",
    module="diffusers.modular_pipelines.modular_pipeline_utils",
    claims={"diffusers": ">=0.35.0,<=0.42.1"},
    patterns=(r"Object of type \w+Config is not JSON serializable",),
    frames=("modular_pipeline", "tokenization_utils"),
    asked_once=True,
)

_CONFIG = "quantization_config"
_KEEPERS = (
    "AutoFeatureExtractor",
    "AutoImageProcessor",
    "AutoProcessor",
    "AutoTokenizer",
    "AutoVideoProcessor",
    "FeatureExtractionMixin",
    "ImageProcessingMixin",
    "PreTrainedTokenizerBase",
    "ProcessorMixin",
)


def broken(utils: ModuleType) -> bool:
    """Does ``load`` know nothing of such a config? A trial would import diffusers' AutoModel."""
    return _CONFIG not in names_used(resolve(utils, "ComponentSpec.load"))


def patch(utils: ModuleType, draft: Draft) -> None:
    def make(original):
        def load(self, **kwargs):
            if _CONFIG in kwargs and _keeps_what_it_gets(self.type_hint):
                del kwargs[_CONFIG]
            return original(self, **kwargs)

        return load

    draft.wrap_plain(resolve(utils, "ComponentSpec"), "load", make)


def _keeps_what_it_gets(kind: Any) -> bool:
    """Whether a component's type is a tokenizer or processor that transformers loads.

    All others get the config as before: what is no model may load one, as ``AutoModel`` and whole pipelines do, and a
    user's processor with a ``from_pretrained`` of its own.
    """
    if not isinstance(kind, type):  # without a type ``load`` finds one by loading
        return False
    loader = next((base for base in kind.__mro__ if "from_pretrained" in vars(base)), kind)
    names = {base.__name__ for base in kind.__mro__ if _is_of_transformers(base)}
    return _is_of_transformers(loader) and not names.isdisjoint(_KEEPERS)


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "transformers"
