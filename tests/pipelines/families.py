"""The pipeline classes that the installed diffusers exports, and which of them cannot be built here."""

from __future__ import annotations

import functools


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
        if name not in NOT_BUILT:
            found.setdefault(kind.__module__.split(".")[-2], []).append(name)
    return found


# Pipeline -> why no tiny instance of it runs here.
NOT_BUILT: dict[str, str] = {
    "BlipDiffusionControlNetPipeline": "upstream: 'Blip2QFormerModel' object has no attribute 'invert_attention_mask'",
    "BlipDiffusionPipeline": "upstream: 'Blip2QFormerModel' object has no attribute 'invert_attention_mask'",
    "ChromaInpaintPipeline": "upstream: AttributeError: 'FrozenDict' object has no attribute 'guidance_embeds'",
    "Cosmos2_5_PredictBasePipeline": "needs torchvision, whose wheels need a CUDA build of torch",
    "Cosmos2_5_TransferPipeline": "needs torchvision, whose wheels need a CUDA build of torch",
    "DiffusionGemmaPipeline": "calls CUDA graphs, which a CPU build of torch lacks",
    "EasyAnimateControlPipeline": "upstream: TypeError: encode_prompt() has no 'text_encoder_index'",
    "I2VGenXLPipeline": "upstream: AttributeError: 'CLIPTextModel' object has no attribute 'text_model'",
    "JoyImageEditPipeline": "works at 1024 x 1024 only: too slow here",
    "Kandinsky6SRPipeline": "works from 256 x 256 on: no rule yet",
    "LTX2DFRTemporalRefinePipeline": "is called with the output of another pipeline: no rule yet",
    "LTX2LatentUpsamplePipeline": "has neither denoiser nor text encoder: nothing to quantize",
    "LTX2VideoDiffusionDecodePipeline": "compiles its attention, which takes minutes and is for GPUs",
    "LTXLatentUpsamplePipeline": "has neither denoiser nor text encoder: nothing to quantize",
    "MiniMaxH3ModularPipeline": "its tiny instance does not end in 100 s",
    "MiniMaxMusic3ModularPipeline": "wants the lyrics of a song: no rule yet",
    "MotifVideoImage2VideoPipeline": "gives its processor of images tensors of the device, which needs torchvision",
    "MusicLDMPipeline": "upstream: AttributeError: 'BaseModelOutputWithPooling' object has no attribute 'to'",
    "OmniGenPipeline": "needs torchvision, whose wheels need a CUDA build of torch",
    "RFD4ProteinaPipeline": "a model of proteins: no rule yet",
    "SanaWMLTX2Refiner": "is called with the output of another pipeline: no rule yet",
    "UniDiffuserPipeline": "upstream: RuntimeError: Some tensors share memory, from save_pretrained",
    "VersatileDiffusionPipeline": "has no call of its own",
}
