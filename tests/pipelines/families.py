"""The pipeline classes that the installed diffusers exports, and which of them cannot be built here."""

from __future__ import annotations

import functools
import importlib.util

from tests.gate import unmet


@functools.cache
def pipelines() -> dict[str, type]:
    """Name -> class of every pipeline that diffusers exports; those with a missing dependency are not among them."""
    import diffusers

    found = {}
    for name in dir(diffusers):
        if "Pipeline" not in name and not name.startswith("SanaWM"):
            continue
        try:
            exported = getattr(diffusers, name)
        except RuntimeError:  # its module cannot be imported beside the other libraries of an older set
            continue
        except (
            AttributeError
        ):  # a name of diffusers that nothing has: OnnxStableDiffusionInpaintPipelineLegacy
            continue
        if isinstance(exported, type) and issubclass(exported, diffusers.DiffusionPipeline):
            found[name] = exported
    del found["DiffusionPipeline"]
    return found


@functools.cache
def modular() -> dict[str, type]:
    """Name -> class of every modular pipeline that diffusers exports."""
    import diffusers

    found = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("ModularPipeline")}
    base = getattr(diffusers, "ModularPipeline", None)
    return {name: kind for name, kind in found.items() if kind is not base and issubclass(kind, base)}


def every() -> dict[str, type]:
    """Name -> class of all pipelines, of both kinds."""
    return {**pipelines(), **modular()}


def families() -> dict[str, list[str]]:
    """Family, a folder of diffusers' pipelines -> the names of its pipelines that are built here."""
    found: dict[str, list[str]] = {}
    for name, kind in pipelines().items():
        if is_built(name):
            found.setdefault(kind.__module__.split(".")[-2], []).append(name)
    return found


# Pipeline -> why no tiny instance of it runs here.
NOT_BUILT: dict[str, str] = {
    "BlipDiffusionControlNetPipeline": "upstream: 'Blip2QFormerModel' object has no attribute 'invert_attention_mask'",
    "BlipDiffusionPipeline": "upstream: 'Blip2QFormerModel' object has no attribute 'invert_attention_mask'",
    "ChromaInpaintPipeline": "upstream: AttributeError: 'FrozenDict' object has no attribute 'guidance_embeds'",
    "DiffusionGemmaPipeline": "calls CUDA graphs, which a CPU build of torch lacks",
    "EasyAnimateControlPipeline": "upstream: TypeError: encode_prompt() has no 'text_encoder_index'",
    "I2VGenXLPipeline": "upstream: AttributeError: 'CLIPTextModel' object has no attribute 'text_model'",
    "MusicLDMPipeline": "upstream: AttributeError: 'BaseModelOutputWithPooling' object has no attribute 'to'",
}


# Some of them -> where they are built
BUILT_WITH: dict[str, str] = {"I2VGenXLPipeline": "transformers<5", "MusicLDMPipeline": "transformers<5"}

# Pipeline -> the module that it asks for, which the tests do not install: it is run by the set ``optional``.
OPTIONAL: dict[str, str] = {
    "AudioDiffusionPipeline": "librosa",
    "ConsisIDPipeline": "cv2",
    "Cosmos2_5_PredictBasePipeline": "torchvision",
    "Cosmos2_5_TransferPipeline": "torchvision",
    "MotifVideoImage2VideoPipeline": "torchvision",  # it gives its processor of images tensors of the device
    "OmniGenPipeline": "torchvision",
}


def is_built(name: str) -> bool:
    """Whether a tiny instance of a pipeline can be made with what is installed."""
    if name in OPTIONAL and importlib.util.find_spec(OPTIONAL[name]) is None:
        return False
    return name not in NOT_BUILT or (name in BUILT_WITH and not unmet(BUILT_WITH[name]))


# What diffusers exports as a placeholder where a package is missing: only the set ``optional`` has some of them.
PLACEHOLDERS: dict[str, str] = {
    "AudioDiffusionPipeline": "librosa",
    "ConsisIDPipeline": "opencv",
    "OnnxStableDiffusionImg2ImgPipeline": "onnx",
    "OnnxStableDiffusionInpaintPipeline": "onnx",
    "OnnxStableDiffusionInpaintPipelineLegacy": "onnx",
    "OnnxStableDiffusionPipeline": "onnx",
    "OnnxStableDiffusionUpscalePipeline": "onnx",
    "SpectrogramDiffusionPipeline": "note_seq",
    "StableDiffusionOnnxPipeline": "onnx",
}

# Upstream's own refusals, raised before anything is changed: pattern of the outcome -> why it refuses.
REFUSALS: dict[str, str] = {
    r"ValueError: Model CPU offload cannot be enabled because no `model_cpu_offload_seq`": "it has no order of models",
    r"ValueError: \w+ControlNetXSPipeline cannot load a LoRA": "half of its layers have other names than those of the "
    "UNet that a LoRA is for; the sentence is ours",
    "RuntimeError: The language model and the RVQ depth decoder must fit on the device together": "it measures the "
    "free memory, of which the rig's devices have little",
    "ValueError: PRXPipeline cannot load a LoRA": "it has the loader of a UNet, and no UNet; the sentence is ours",
}

# What is not exact and no refusal: pipelines, placements -> what is known. Who cures one runs its rows again.
OPEN: dict[tuple[str, str], str] = {}

# The same on older releases: pipelines, pattern of the outcome -> what is known.
BEFORE: dict[tuple[str, str], str] = {
    (
        "Lumina2?Text2ImgPipeline",
        "ValueError: The deprecation tuple",
    ): "cannot be made: upstream forgot to remove these names",
    (
        "ZImageOmniPipeline",
        "ImportError: Siglip2ImageProcessor requires the Torchvision library",
    ): "the set has no torchvision",
    (
        "FluxModularPipeline",
        "ValueError: In FluxAutoBeforeDenoiseStep, exactly one None must be",
    ): "cannot be made in 0.35",
    (
        "WanModularPipeline",
        "AttributeError: 'BlockState' object has no attribute 'prompt_embeds'",
    ): "cannot be run in 0.35",
    (
        "HunyuanVideoImageToVideoPipeline",
        "ValueError: Image features and image tokens do not match",
    ): "0.33 and transformers 4.51 do not fit together",
    (
        "WanVideoToVideoPipeline",
        "AttributeError: 'WanVideoToVideoPipeline' object has no attribute 'scheduelr'",
    ): "a misspelled attribute in 0.33",
    (
        "Kandinsky3(Img2Img)?Pipeline",
        r"upstream: ValueError: \w+ cannot load a LoRA: its unet is a Kandinsky3UNet, which takes none",
    ): "it has a loader and no such layers; the sentence is ours",
    (
        r"Kandinsky(Img2Img|Inpaint)?CombinedPipeline",
        "upstream: TypeError: .*enable_sequential_cpu_offload.. got an unexpected keyword argument 'device'",
    ): "0.31 has no such option, and says so before anything is changed",
}


def without_group_offload() -> set[str]:
    """The models of the installed diffusers that refuse group offload (``_supports_group_offloading = False``)."""
    import diffusers

    exported = {name: getattr(diffusers, name, None) for name in dir(diffusers)}
    return {
        name for name, one in exported.items() if getattr(one, "_supports_group_offloading", None) is False
    }


def placeholders() -> dict[str, list[str]]:
    """Name -> packages it asks for, of every pipeline that the installed diffusers exports as a placeholder."""
    import diffusers
    from diffusers.utils.import_utils import DummyObject

    exported = {name: getattr(diffusers, name) for name in dir(diffusers) if "Pipeline" in name}
    return {name: one._backends for name, one in exported.items() if isinstance(one, DummyObject)}
