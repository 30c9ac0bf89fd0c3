"""A tiny random component of any class that a pipeline's constructor asks for."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

from tests.pipelines.configs import CHOSEN, CONFIGS, MODELS, SHRUNK, SHRUNK_CONFIG

# Rotary embeddings split a head of 32 among their axes.
AXES = {1: (32,), 2: (16, 16), 3: (8, 12, 12), 4: (8, 8, 8, 8)}


class NotBuilt(Exception):
    """No rule builds this component."""


def component(kinds: tuple, overrides: dict[str, Any]):
    """An instance of the first of ``kinds`` for which there is a rule; ``overrides["class"]`` chooses another."""
    import diffusers
    import transformers

    if chosen := overrides.pop("class", None):
        kinds = (_named(chosen),)
    kinds = tuple(
        _named(CHOSEN[kind.__name__]) if getattr(kind, "__name__", "") in CHOSEN else kind for kind in kinds
    )
    for kind in kinds:
        if not isinstance(kind, type):
            continue
        if kind.__name__ == "CosmosSafetyChecker":
            return Unchecked()
        if kind.__name__ == "KarrasDiffusionSchedulers":
            return scheduler(diffusers.DDIMScheduler, overrides)
        if issubclass(kind, diffusers.SchedulerMixin):
            return scheduler(kind, overrides)
        if issubclass(kind, diffusers.ModelMixin):
            return diffusers_model(kind, overrides)
        if issubclass(kind, transformers.PreTrainedModel):
            return transformers_model(kind, overrides)
        if _is_tokenizer(kind):
            return tokenizer(**overrides)
        if _is_processor(kind):
            return processor(kind, overrides)
        if hasattr(kind, "config_name"):  # a guider, an image processor of diffusers
            return kind(**overrides)
    raise NotBuilt(f"no rule builds {' or '.join(getattr(kind, '__name__', str(kind)) for kind in kinds)}")


class Unchecked:
    """In the place of a safety checker that cannot be left out: it finds nothing."""

    def to(self, *args, **kwargs):
        return self

    def check_text_safety(self, text) -> bool:
        return True

    def check_video_safety(self, video):
        return video


def _named(name: str) -> type:
    """The class of that name, which names its module as well where neither library exports it."""
    import diffusers
    import transformers

    module, _, plain = name.rpartition(".")
    if module:
        return getattr(importlib.import_module(module), plain)
    for library in (diffusers, transformers):
        if hasattr(library, name):
            return getattr(library, name)
    raise NotBuilt(f"neither diffusers nor transformers has {name}")


def scheduler(kind: type, overrides: dict[str, Any]):
    if kind.__name__ == "SchedulerMixin":
        from diffusers import FlowMatchEulerDiscreteScheduler as kind
    return kind(**overrides)


def diffusers_model(kind: type, overrides: dict[str, Any]):
    import torch

    torch.manual_seed(0)
    model = kind(**diffusers_config(kind, overrides)).eval()
    # Gates and last layers that start at zero: what stands before them would have no effect.
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def diffusers_config(kind: type, overrides: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(kind.__init__).parameters
    config = {}
    for name, parameter in parameters.items():
        if _says_axes(name, parameter.default):
            config[name] = type(parameter.default)(AXES[len(parameter.default)])
        elif name in SHRUNK and (parameter.default is not None):
            config[name] = copy.deepcopy(SHRUNK[name])
    config.update(copy.deepcopy(MODELS.get(kind.__name__, {})))
    config.update(overrides)
    return {name: value for name, value in config.items() if name in parameters}


def _says_axes(name: str, default: Any) -> bool:
    return (
        ("axes_dim" in name or "rope_axes" in name or name in ("axis_dims", "rope_dim_list", "rope_dim"))
        and isinstance(default, (tuple, list))
        and len(default) in AXES
    )


def transformers_model(kind: type, overrides: dict[str, Any]):
    import torch

    torch.manual_seed(0)
    model = kind(transformers_config(kind, overrides)).eval()
    if kind.__name__ == "ChatGLMModel":  # whose weights are what the memory held before
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def transformers_config(kind: type, overrides: dict[str, Any]):
    given = {**copy.deepcopy(CONFIGS.get(kind.__name__, {})), **overrides}
    config_class = _named(given.pop("config_class")) if "config_class" in given else kind.config_class
    if "text_config" in given and config_class is not None and not hasattr(config_class(), "text_config"):
        given.update(given.pop("text_config"))  # transformers before 4.52: Qwen 2 VL has it all in one
    return config_class(**_shrunk(config_class, given))


def _shrunk(config_class: type, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a config: what ``SHRUNK_CONFIG`` knows, in its parts too, and then what is given."""
    if config_class is None:
        raise NotBuilt("the model class names no config")
    full = config_class()
    config = {
        name: value
        for name, value in SHRUNK_CONFIG.items()
        if not isinstance(_default(full, name), (type(...), list, tuple, dict))
    }
    for name in getattr(full, "sub_configs", {}):  # a property of some classes
        part = getattr(full, name, None)
        if part is not None:
            config[name] = {**_shrunk(type(part), given.get(name, {})), "model_type": part.model_type}
    if len(getattr(full, "layer_types", None) or ()) and "num_hidden_layers" in config:
        config["layer_types"] = list(full.layer_types)[: config["num_hidden_layers"]]
    return {
        **config,
        **{name: value for name, value in given.items() if not isinstance(config.get(name), dict)},
    }


def _default(config, name: str):
    """The value of a config, or ``...`` where it has none or one for each layer."""
    try:
        return getattr(config, name, ...)
    except Exception as error:  # a type that only the newest transformers has
        if "per-layer" not in str(error):
            raise
        return ...


def _is_tokenizer(kind: type) -> bool:
    return "Tokenizer" in kind.__name__ or kind.__name__ in ("PythonBackend", "TokenizersBackend")


def _is_processor(kind: type) -> bool:
    return "Processor" in kind.__name__ or "FeatureExtractor" in kind.__name__


SPECIAL = [
    *("<pad>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>", "<image>", "[IMG]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"),
    *("<|startoftext|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<mask>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<grid>", "</grid>"),
]


def tokenizer(max_length: int = 77, positions: bool = False, framed: bool = True):
    """One token for each byte, and some special ones that chat templates use; made in memory.

    ``framed``: each text begins and ends with a token of its own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if framed:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B </s>",
            special_tokens=[("<s>", 2), ("</s>", 3)],
        )
    made = _tokenizer_class(positions)(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="<mask>",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        additional_special_tokens=SPECIAL[4:],
    )
    made.chat_template = CHAT
    made.image_token, made.image_token_id = "<|image_pad|>", 8
    made.grid_bos_token, made.grid_eos_token = "<grid>", "</grid>"
    return made


def _tokenizer_class(positions: bool) -> type:
    from transformers import PreTrainedTokenizerFast

    class Numbered(PreTrainedTokenizerFast):
        """Gives the positions of the tokens as well, as ChatGLM's does."""

        def __call__(self, *args, **options):
            import torch

            encoded = super().__call__(*args, **options)
            ids = encoded["input_ids"]
            encoded["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)
            return encoded

    return Numbered if positions else PreTrainedTokenizerFast


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'text' %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def processor(kind: type, overrides: dict[str, Any]):
    """An image processor for images of 32 pixels, or a processor around one and a tokenizer."""
    import transformers

    name = kind.__name__
    if issubclass(kind, transformers.ProcessorMixin):
        # The class of videos' processors needs torchvision, even to say that there is none.
        # Its module is the library's: modular pipelines look the class up by its name.
        unchecked: dict[str, Any] = {
            "check_argument_for_proper_class": lambda self, name, argument: type(argument),
            "__module__": kind.__module__,
        }
        parts = {}
        # transformers before 5 has a list instead
        for part in kind.get_attributes() if hasattr(kind, "get_attributes") else kind.attributes:
            if "tokenizer" in part:
                parts[part] = tokenizer(4096, **overrides.pop(part, {}))
                if hasattr(kind, "attributes"):  # these check the class themselves
                    unchecked[f"{part}_class"] = "AutoTokenizer"
            else:
                parts[part] = _part(kind, part)
        if "chat_template" in inspect.signature(kind.__init__).parameters:
            parts["chat_template"] = CHAT
        return type(name, (kind,), unchecked)(**{**parts, **overrides})
    if name == "AutoProcessor":
        kind = _pil("CLIPImageProcessor")
    if "Clap" in name:
        return kind(feature_size=16, **overrides)
    sizes: dict[str, Any] = {"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}}
    if "CLIP" in name and "Siglip" not in name:
        sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    if "Qwen2VL" in name:
        sizes = {"size": {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}}
    return kind(**{**sizes, **overrides})


def _part(kind: type, part: str):
    if part == "video_processor":
        return None
    names = {
        "Qwen2VLProcessor": "Qwen2VLImageProcessor",
        "Qwen2_5_VLProcessor": "Qwen2VLImageProcessor",
        "Qwen3VLProcessor": "Qwen2VLImageProcessor",
    }
    return processor(_pil(names.get(kind.__name__, "CLIPImageProcessor")), {})


def _pil(name: str) -> type:
    """The image processor that needs Pillow alone: transformers 5 gave its class a name of its own."""
    import transformers

    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
