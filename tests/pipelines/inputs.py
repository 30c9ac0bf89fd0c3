"""What a tiny pipeline is called with: by parameter name, and by pipeline where that does not do."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy

SIZE = 32
FRAMES = 5  # two latent frames where the VAE compresses four into one


def image(seed: int = 0, size: int = SIZE):
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype="uint8")
    return Image.fromarray(pixels)


def mask(size: int = SIZE):
    from PIL import Image

    pixels = numpy.zeros((size, size), dtype="uint8")
    pixels[: size // 2] = 255
    return Image.fromarray(pixels)


def video(frames: int = FRAMES, size: int = SIZE):
    return [image(i, size) for i in range(frames)]


def noise(*shape: int, seed: int = 1):
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


RESIDUES = 8


def protein() -> dict[str, Any]:
    """The features of a chain of residues of which little is known."""
    import torch

    whole = torch.zeros(1, RESIDUES, dtype=torch.long)
    chain = (
        "condition_sequence_1_residue",
        "condition_index-group_1_token",
        "molecule_iid",
        "molecule_entity_id",
    )
    kinds = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord")
    atoms = [*(f"condition_{kind}_1_atom" for kind in kinds), "charge", "element"]
    pairs = ("token_bond_path_length", "bond_mask", "na_ss_pair", "na_ss_pair_mask")
    return {
        **dict.fromkeys((*chain, "na_ss_state", "na_ss_state_mask"), whole),
        **dict.fromkeys(atoms, torch.ones(1, RESIDUES, 37, dtype=torch.long)),
        **dict.fromkeys(pairs, torch.ones(1, RESIDUES, RESIDUES)),
    }


HEAD = "<|start_header_id|><|end_header_id|>"  # of a message, in Llama 3's template

# parameter -> value; a function is called for it. Given only where the constructor or the task asks for it, see GIVEN
VALUES: dict[str, Any] = {
    "prompt": "a cat",
    "height": SIZE,
    "width": SIZE,
    "num_inference_steps": 2,
    "prior_num_inference_steps": 2,
    "decoder_num_inference_steps": 2,
    "super_res_num_inference_steps": 2,
    "num_frames": FRAMES,
    "video_length": 2,
    "max_sequence_length": 16,
    "output_type": "np",
    "use_resolution_binning": False,
    "clean_caption": False,
    "image": image,
    "mask_image": mask,
    "control_image": image,
    "video": video,
    "reference_image": image,
    "audio_length_in_s": 0.1,
    "complex_human_instruction": None,
}
# Optional parameters that are given all the same
ALWAYS = set(VALUES)

# pattern over pipeline names -> parameters; all that match apply, the last one wins; `...` leaves one out
CALLS: dict[str, dict[str, Any]] = {
    ".*": {"strength": 0.9},
    "AnimateDiff|TextToVideoSD|VideoToVideoSD|StableVideoDiffusion|PIA|I2VGen|Latte": {
        "num_frames": 2,
        "video_length": 2,
        "video": lambda: video(2),
        "conditioning_frames": lambda: video(2),
    },
    "LTX": {"num_frames": 9, "video": lambda: video(9)},
    "Allegro": {"num_frames": 8, "output_type": "latent"},  # its VAE decodes large videos only
    "WanAnimate": {"pose_video": video, "face_video": video, "segment_frame_length": FRAMES},
    "Marigold": {"processing_resolution": 32, "output_type": "np"},
    "DiT": {"class_labels": [1]},
    "StableDiffusionAttendAndExcite": {"token_indices": [2], "attn_res": (8, 8)},
    "CycleDiffusion": {"source_prompt": "a dog", "eta": 0.1},
    "BlipDiffusion": {
        "source_subject_category": "dog",
        "target_subject_category": "dog",
        "condtioning_image": image,
    },
    "VisualCloze": {
        "task_prompt": "a task",
        "content_prompt": "a cat",
        "image": lambda: [[image(1), image(2)], [image(3), None]],
        "upsampling_height": SIZE,
        "upsampling_width": SIZE,
    },
    "FluxKontext": {"_auto_resize": False, "max_area": 32 * 32},
    "AnimateDiffSparse": {"conditioning_frames": lambda: [image()]},
    "AnimateDiffVideoToVideo": {"strength": 0.9},
    "Kandinsky(?!.*(Prior|Combined|3|5|6))": {
        "image_embeds": lambda: noise(1, 64).bfloat16(),
        "negative_image_embeds": lambda: noise(1, 64).bfloat16(),
        "hint": lambda: noise(1, 3, 32, 32).bfloat16(),
    },
    "KandinskyV22Controlnet": {"hint": lambda: noise(1, 3, 128, 128).bfloat16()},
    "TextToVideoZero": {"t0": 0, "t1": 1},
    "IFImg2Img|IFInpaint": {"original_image": image},
    "MusicLDM|AudioLDM|StableAudioPipeline": {"output_type": "np"},
    "LongCatAudio": {"audio_duration_s": 0.5},
    "StableAudio3": {"duration": 0.5},
    "AnyFlow": {"video": ...},
    "AnyFlowFAR": {"chunk_partition": [1, 1]},
    "FluxControlNetPipeline|StableDiffusion3ControlNet|FluxControlNetI|QwenImageControlNet": {
        "control_image": image
    },
    "Flux2": {"text_encoder_out_layers": (1, 1, 1)},
    "Flux2Klein": {"image": lambda: image(size=64)},
    "Flux2Pipeline": {"image": ...},
    "BriaFiboEdit": {"prompt": '{"edit_instruction": "a cat"}'},
    "CogVideoXFunControl": {"control_video": video},
    "Cosmos.*VideoToWorld|Cosmos3|Helios|LTXCondition": {"video": ...},
    "CosmosVideoTo": {"image": image, "num_frames": 9},
    "Cosmos2_5_PredictBase": {"image": image},
    "Cosmos2_5_Transfer": {  # two chunks
        "controls": lambda: video(9),
        "num_frames": 9,
        "num_frames_per_chunk": FRAMES,
    },
    "ConsisID": {
        "num_frames": 9,
        "id_vit_hidden": lambda: [noise(1, 4, 64), noise(1, 4, 64, seed=2)],
        "id_cond": lambda: noise(1, 64),
        "kps_cond": [(8, 8), (24, 8), (16, 16), (10, 24), (22, 24)],
    },
    "OmniGen": {
        "prompt": "a cat <img><|image_1|></img>",
        "input_images": lambda: [image()],
        "max_input_image_size": SIZE,
    },
    "Ideogram4": {"guidance_schedule": (7.0, 7.0), "max_sequence_length": 64},
    "LTX2": {
        "stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_stg_scale": 0.0,
        "spatio_temporal_guidance_blocks": None,
    },
    "LTX2ImageToVideo": {"image_crf": 0},
    "LTX2|LTXLatent": {"height": 64, "width": 64},
    "LTXI2VLong": {"decode_horizontal_tiles": 1, "decode_vertical_tiles": 1},
    "NucleusMoE": {"return_index": -1},
    "QwenImageControlNetInpaint": {"control_mask": mask},
    "EasyAnimateInpaint": {
        "negative_prompt": "a dog",
        "video": lambda: noise(1, 3, FRAMES, 32, 32),
        "mask_video": lambda: noise(1, 1, FRAMES, 32, 32) * 0 + 255,
    },
    "EasyAnimateControl": {"control_video": lambda: noise(1, 3, FRAMES, 32, 32)},
    "HunyuanVideoFramepack": {"latent_window_size": 3},
    "SkyReelsV2DiffusionForcing": {"overlap_history": None, "base_num_frames": FRAMES},
    "Sana": {"frames": FRAMES},
    "ShapE": {"output_type": "latent"},
    "Helios": {"image": ..., "video": ..., "num_latent_frames_per_chunk": 2},
    "HeliosPyramid": {"height": 64, "width": 64},
    "StableAudio3Inp": {"mask_start_seconds": 0.1, "mask_end_seconds": 0.3},
    "StableCascadePrior": {"height": 64, "width": 64},
    "(StableCascade|Wuerstchen)Combined": {"height": 128, "width": 128},
    "EasyAnimatePipeline": {"negative_prompt": "a dog"},
    "VQDiffusion": {"generator": None},  # it wants one of the device
    "ZImageOmni": {"image": lambda: image(size=64)},
    "SkyReelsV2DiffusionForcingVideo": {"overlap_history": 1},
    "PaintByExample": {"example_image": image},
    "StableAudio3(Audio|Inp)": {"audio": lambda: noise(1, 2, 4096)},
    "StableCascadeDecoder": {"image_embeddings": lambda: noise(1, 16, 4, 4).bfloat16()},
    "WuerstchenDecoder": {"image_embeddings": lambda: noise(1, 16, 3, 3).bfloat16()},
    "StableDiffusion3ControlNetInpainting": {"control_mask": mask},
    "StableDiffusionDiffEdit": {"image_latents": lambda: noise(1, 4, 32, 32).bfloat16()},
    "StableDiffusionGLIGEN": {"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.1, 0.5, 0.5]]},
    "StableDiffusionGLIGENText": {"gligen_images": lambda: [image()]},
    "StableDiffusionPix2PixZero": {
        "source_embeds": lambda: noise(1, 77, 64).bfloat16(),
        "target_embeds": lambda: noise(1, 77, 64, seed=2).bfloat16(),
    },
    "StableDiffusionXLControlNetUnion": {"control_mode": [0], "control_image": lambda: [image()]},
    "QwenImage21": {"output_resolution": 32},
    "AudioDiffusion": {"steps": 2},
    "AudioLDM2": {"transcription": "a cat", "max_new_tokens": 4},
    "AceStep": {"audio_duration": 1.0, "max_text_length": 16, "max_lyric_length": 16},
    "LEditsPP": {"editing_prompt": ["a dog"]},
    "Kandinsky5I2I": {"max_sequence_length": 512},
    "Kandinsky5I2V": {
        "num_frames": 21
    },  # its first four latent frames take their scale from those behind them
    "Kandinsky6TI2VA": {"image": ...},
    "Kandinsky6SR": {"video": lambda: video(size=64), "resolution_scale": 2},
    "HeliosPyramidDistilledPipeline": {"pyramid_num_inference_steps_list": [1, 1, 1]},
    "GlmImage": {"image": ...},
    "HunyuanVideoImageToVideo": {
        "prompt_template": {
            "template": f"{HEAD}<image>{HEAD}{{}}{HEAD}\n\n",
            "crop_start": 6,
            "image_emb_start": 3,
            "image_emb_end": 579,
            "double_return_token_id": 223,  # a line's end in our tokenizer; asked for up to 0.36
        },
    },
    "LTX2VideoDiffusionDecode": {"latents": lambda: noise(1, 128, 2, 2, 2)},
    "LTX2DFR": {"num_frames": 17},
    "LTX2DFRTemporalRefine": {
        "latents": lambda: noise(1, 128, 3, 2, 2),
        "keyframes_latents": lambda: noise(1, 128, 2, 2, 2, seed=2),
        "keyframe_positions": [8, 16],
        "audio_latents": lambda: noise(1, 8, 18, 16),
    },
    "Echo": {"num_frames": 9, "height": 64, "width": 64},
    "Flux3": {"max_new_tokens": 4, "text_encoder_out_layers": (1, 1, 1)},
    "SanaWMPipeline": {
        "action": "w-8",
        "intrinsics": [32.0, 32.0, 16.0, 16.0],
        "num_frames": 9,
        "height": 64,
        "width": 64,
    },
    "SanaWMLTX2Refiner": {"sana_latent": lambda: noise(1, 128, 5, 2, 2), "fps": 8.0},
    "MiniMaxH3": {"num_frames": 124, "num_inference_steps": 3},  # five seconds at least
    "MiniMaxMusic3": {"lyrics": "a cat", "audio_duration": 0.2},
    "RFD4Proteina": {
        "padding_mask": lambda: noise(1, RESIDUES) < 9,  # all of them
        "is_in_context_conditioning": lambda: noise(1, RESIDUES) > 9,
        "supports_local_latent": lambda: noise(1, RESIDUES) < 9,
        "token_type": lambda: noise(1, RESIDUES).long() * 0,
        "atom37_mask": lambda: noise(1, RESIDUES, 37) < 9,
        "conditioning_features": protein,
    },
    "Wan(22)?Image2Video": {"image": image},
    "WanAnimate2": {"image": image, "driving_video": video, "segment_frame_length": FRAMES},
    "LLaDA2|DiffusionGemma": {"gen_length": 16, "block_length": 8, "output_type": "seq"},
    "UnCLIP": {"output_type": "np"},
}


# pattern over pipeline names -> what is called before the pipeline
BEFORE: dict[str, Callable] = {
    "Kandinsky5(T2I|I2I)": lambda pipe: setattr(pipe, "resolutions", [(SIZE, SIZE)]),
    "BriaFibo2": lambda pipe: setattr(pipe, "text_encoder_out_layers", ((0, 1, 2),) * 6),
    "LongCatImagePipeline": lambda pipe: setattr(
        pipe, "tokenizer_max_length", 16
    ),  # as many tokens it generates
    "HiDreamImage": lambda pipe: setattr(
        pipe, "default_sample_size", 16
    ),  # whatever size is asked for, it grows
    "LEditsPP": lambda pipe: pipe.invert(image=image(size=64), num_inversion_steps=4, skip=0.1),
}


def _block_mask(*args, _compile: bool, **options):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(*args, **options)


# What pipelines keep in their modules, sizes of images for instance: pattern -> name in the module -> value.
# Of a modular pipeline it is the module of its encoders; a name with dots names its module.
SIZES: dict[str, dict[str, Any]] = {
    # librosa draws the phases.
    "AudioDiffusion": {"numpy.random.default_rng": lambda: numpy.random.Generator(numpy.random.PCG64(0))},
    "QwenImageEdit(Inpaint)?Pipeline": {"calculate_dimensions": lambda area, ratio: (SIZE, SIZE, None)},
    "WanAnimate2": {  # it compiles the mask, for which Inductor has no kernels of the stand-ins
        "diffusers.models.transformers.transformer_wan_animate_2.create_block_mask": _block_mask
    },
    "LongCatImagePipeline": {"SYSTEM_PROMPT_EN": "Rewrite", "SYSTEM_PROMPT_ZH": "Rewrite"},
    "Krea2(Turbo)?Modular": {"KREA2_TEXT_ENCODER_SELECT_LAYERS": (1,) * 12},
    "JoyImageEdit": {"diffusers.pipelines.joyimage.image_processor.BUCKETS": {1024: [(SIZE, SIZE)]}},
    "Ideogram4": {"QWEN3_VL_ACTIVATION_LAYERS": (0,) * 13},
    "QwenImage(EditPlus|Layered)Pipeline|LongCatImageEdit": {
        "calculate_dimensions": lambda area, ratio: (SIZE, SIZE)
    },
    "QwenImage(Edit|EditPlus|Layered)Modular": {
        "calculate_dimensions": lambda area, ratio: (SIZE, SIZE, None)
    },
}


# Pipelines that have no call of their own: name -> method that is called instead
METHODS = {"VersatileDiffusionPipeline": "text_to_image"}


def parameters_of(name: str, kind: type) -> Mapping[str, inspect.Parameter]:
    """The parameters of what is called."""
    return inspect.signature(getattr(kind, METHODS.get(name, "__call__"))).parameters


def arguments(name: str, kind: type) -> dict[str, Any]:
    """The keyword arguments of one run; no seed yet."""
    given: dict[str, Any] = {}
    parameters = parameters_of(name, kind)
    for parameter in parameters.values():
        wanted = parameter.default is inspect.Parameter.empty or parameter.name in ALWAYS
        if parameter.name in VALUES and wanted:
            given[parameter.name] = VALUES[parameter.name]
    for pattern, said in CALLS.items():
        if re.match(pattern, name):
            given.update({key: value for key, value in said.items() if key in parameters})
    return {
        key: value() if isinstance(value, Callable) else value
        for key, value in given.items()
        if value is not ...
    }


def run(pipe, name: str):
    """All tensors of one run's output, on the CPU."""
    import torch

    given = arguments(name, type(pipe))
    device = pipe._execution_device
    given = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()
    }
    if "generator" in parameters_of(name, type(pipe)):
        given.setdefault("generator", torch.Generator("cpu").manual_seed(0))
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ftfy(type(pipe).__module__))
        stack.enter_context(sized(name, type(pipe).__module__))
        for pattern, prepare in BEFORE.items():
            if re.match(pattern, name):
                prepare(pipe)
        called = getattr(pipe, METHODS[name]) if name in METHODS else pipe
        return flatten(called(**given))


@contextlib.contextmanager
def sized(pipeline: str, module: str):
    """With what ``SIZES`` says of a pipeline, whose module is the one of that name."""
    with contextlib.ExitStack() as stack:
        for pattern, sizes in SIZES.items():
            if re.match(pattern, pipeline):
                for name, value in sizes.items():
                    stack.enter_context(mock.patch(name if "." in name else f"{module}.{name}", value))
        yield


def ftfy(name: str):
    """Modules that clean prompts call ``ftfy`` although they import it only where it is installed."""
    module = sys.modules.get(name)
    cleans = hasattr(module, "is_ftfy_available") or hasattr(module, "basic_clean")
    if hasattr(module, "ftfy") or not cleans:
        return contextlib.nullcontext()
    return mock.patch.object(module, "ftfy", SimpleNamespace(fix_text=str), create=True)


def flatten(output) -> list:
    """The tensors in whatever a pipeline returns."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output.detach().cpu()]
    if isinstance(output, numpy.ndarray):
        return [torch.from_numpy(numpy.ascontiguousarray(output))] if output.dtype.kind in "fiub" else []
    if isinstance(output, str):
        return [torch.tensor(list(output.encode()))]
    if hasattr(output, "convert"):  # an image
        return [torch.from_numpy(numpy.array(output))]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in flatten(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in flatten(value)]
    return []
