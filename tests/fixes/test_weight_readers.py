"""Code of diffusers and transformers that reads the weight of a layer, instead of calling the layer.

A quantized layer computes what a plain one does, but its weight is packed: whoever casts to ``layer.weight.dtype`` gets
integers, whoever gives ``layer.weight`` to a function of torch gives bytes.  The syntax trees of the installed releases
are searched for such places, and each must be in the list below: what a new release adds fails until somebody has
looked at it.  Not seen are weights that a name other than ``weight`` hands on.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusers_quantfix.fixes import NAMES
from tests.gate import unmet

# Functions that run once, when a model is made or loaded, or for an adapter.
ONCE = re.compile(r"__init__|_*init.*|reset_.*|tie_.*|_*convert.*|from_.*|load_.*|set_.*|_*fuse.*|.*lora.*")
# Layers that no backend quantizes, by their class or, where that is unknown, by their name.
OTHER_CLASS = re.compile(r"norm|conv|embed", re.IGNORECASE)
OTHER_NAME = re.compile(
    r"norm|conv|embed(ding)?s?$|embed_tokens|^patch_embed|get_input_embeddings", re.IGNORECASE
)

KEPT = "its model keeps the layer out of quantization (_keep_in_fp32_modules)"
# quanto looks for the names of layers only, not of blocks, and quantizes it: then a run ends in an error.
KEPT_WHOLE = "its model keeps the block out of quantization (_keep_in_fp32_modules), but for quanto"
GUARDED = "asks first whether the dtype is a floating one"
FIRST = "the first parameter is that of a convolution or a table, which nobody quantizes"
ADAPTER = "a layer that is trained beside the quantized ones, and not quantized"
UNUSED = "no pipeline of diffusers calls it"

# Why a place does no harm, or which fix mends it -> "file: class: expression" of the models.
MODELS = {
    "diffusers-motion-linear-input": """
        unet_motion_model: AnimateDiffTransformer3D: self.proj_in(input=)
        unet_motion_model: AnimateDiffTransformer3D: self.proj_out(input=)
    """,
    "diffusers-image-projection-dtype": """
        embeddings: ImageProjection: self.image_embeds.weight
    """,
    "diffusers-hunyuan-pooler-weights": """
        embeddings: HunyuanDiTAttentionPool: self.c_proj.weight
        embeddings: HunyuanDiTAttentionPool: self.k_proj.weight
        embeddings: HunyuanDiTAttentionPool: self.q_proj.weight
        embeddings: HunyuanDiTAttentionPool: self.v_proj.weight
    """,
    "diffusers-anyflow-embedder-dtype": """
        transformer_anyflow: AnyFlowDualTimestepTextImageEmbedding: self.delta_embedder.parameters()
        transformer_anyflow: AnyFlowDualTimestepTextImageEmbedding: self.time_embedder.parameters()
    """,
    "diffusers-anyflow-far-embedder-dtype": """
        transformer_anyflow_far: AnyFlowDualTimestepTextImageEmbeddingCausal: self.delta_embedder.parameters()
        transformer_anyflow_far: AnyFlowDualTimestepTextImageEmbeddingCausal: self.time_embedder.parameters()
    """,
    KEPT: """
        transformer_chronoedit: WanTimeTextImageEmbedding: self.time_embedder.parameters()
        transformer_cosmos3: Cosmos3OmniTransformer: self.time_embedder.parameters()
        transformer_helios: HeliosTimeTextEmbedding: self.time_embedder.parameters()
        transformer_joyimage: JoyImageTimeTextImageEmbedding: self.time_embedder.parameters()
        transformer_joyimage_edit_plus: JoyImageEditPlusTimeTextImageEmbedding: self.time_embedder.parameters()
        transformer_wan: WanTimeTextImageEmbedding: self.time_embedder.parameters()
        transformer_wan_animate_2: WanAnimate2Transformer3DModel: self.time_embedding.parameters()
    """,
    GUARDED: """
        controlnet_z_image: TimestepEmbedder: self.mlp[0].weight
        transformer_bria_fibo2: TimestepEmbedder: self.mlp[0].weight
        transformer_wan_animate: WanTimeTextImageEmbedding: self.time_embedder.linear_1.weight
        transformer_z_image: TimestepEmbedder: self.mlp[0].weight
    """,
    FIRST: """
        auraflow_transformer_2d: AuraFlowTransformer2DModel: self.parameters()
        autoencoder_kl_allegro: AllegroDecoder3D: self.up_blocks.parameters()
        autoencoder_kl_temporal_decoder: TemporalDecoder: self.up_blocks.parameters()
        autoencoder_longcat_audio_dit: LongCatAudioDiTVae: self.decoder.parameters()
        autoencoder_longcat_audio_dit: LongCatAudioDiTVae: self.encoder.parameters()
        vae: MaskConditionDecoder: self.up_blocks.parameters()
    """,
    ADAPTER: """
        attention_processor: CustomDiffusionAttnProcessor2_0: self.to_k_custom_diffusion.weight
        attention_processor: CustomDiffusionAttnProcessor2_0: self.to_v_custom_diffusion.weight
        attention_processor: CustomDiffusionAttnProcessor: self.to_k_custom_diffusion.weight
        attention_processor: CustomDiffusionAttnProcessor: self.to_v_custom_diffusion.weight
        attention_processor: CustomDiffusionXFormersAttnProcessor: self.to_k_custom_diffusion.weight
        attention_processor: CustomDiffusionXFormersAttnProcessor: self.to_v_custom_diffusion.weight
        lora: LoRALinearLayer: self.down.weight
    """,
    "diffusers-custom-diffusion-dtype": """
        attention_processor: CustomDiffusionAttnProcessor2_0: attn.to_q.weight
        attention_processor: CustomDiffusionAttnProcessor: attn.to_q.weight
        attention_processor: CustomDiffusionXFormersAttnProcessor: attn.to_q.weight
    """,
    KEPT_WHOLE: """
        autoencoder_kl_minimax_h3_audio: MiniMaxH3AudioAttnProcessor: attn.qkv.weight
    """,
}
# The same of the pipelines and their own models; "*" where many pipelines say it alike.
PIPELINES = {
    FIRST: """
        *: *: components.image_encoder.parameters()
        *: *: self.image_encoder.parameters()
        *: *: image_encoder.parameters()
        *: *: self.vae.post_quant_conv.parameters()
        *: *: components.vae.post_quant_conv.parameters()
        *: *: self.vae.parameters()
        *: *: self.unet.parameters()
        modeling_stable_audio: StableAudioNumberConditioner: self.time_positional_embedding.parameters()
        pipeline_cosmos3_omni: Cosmos3OmniPipeline: self.sound_tokenizer.parameters()
        refiner: SanaWMLTX2Refiner: self.transformer.parameters()
    """,
    ADAPTER: """
        *: *: self.projection_matrices[layer_num].weight
    """,
    "diffusers-cascade-prior-dtype": """
        pipeline_stable_cascade_prior: StableCascadePriorPipeline: self.prior.parameters()
    """,
    "diffusers-ace-step-tokenizer-weights": """
        modeling_ace_step: _AceStepResidualFSQ: self.project_in.weight
        modeling_ace_step: _AceStepResidualFSQ: self.project_out.weight
    """,
    "diffusers-shap-e-quantized-renderer": """
        renderer: ChannelsProj: self.proj.weight
    """,
}
TEXT_ENCODERS = {
    KEPT: """
        modeling_t5: T5DenseActDense: self.wo.weight
        modeling_t5: T5DenseGatedActDense: self.wo.weight
        modeling_umt5: UMT5DenseActDense: self.wo.weight
        modeling_umt5: UMT5DenseGatedActDense: self.wo.weight
    """,
    GUARDED: """
        modeling_gemma4: Gemma4VisionPatchEmbedder: self.input_proj.weight
        modeling_gemma4_unified: Gemma4UnifiedMultimodalEmbedder: self.embedding_projection.weight
        modeling_gemma4_unified: Gemma4UnifiedVisionEmbedder: self.patch_dense.weight
    """,
    UNUSED: """
        modeling_blip_2: Blip2ForImageTextRetrieval: self.itm_head.weight
        modeling_blip_2: Blip2ForImageTextRetrieval: self.text_projection.weight
        modeling_blip_2: Blip2ForImageTextRetrieval: self.vision_projection.weight
        modeling_blip_2: Blip2TextModelWithProjection: self.text_projection.weight
        modeling_blip_2: Blip2VisionModelWithProjection: self.vision_projection.weight
        modeling_qwen2_vl: Qwen2VisionTransformerPretrainedModel: self.blocks[0].mlp.fc2.weight
    """,
    "transformers-siglip2-patch-dtype": """
        modeling_siglip2: Siglip2VisionEmbeddings: self.patch_embedding.weight
    """,
}  # fmt: skip


def layer_classes(node: ast.ClassDef) -> dict[str, str]:
    """Name of a child -> the class that a class definition makes it of."""
    found: dict[str, str] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call):
            target = part.targets[0]
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.setdefault(target.attr, ast.unparse(part.value.func).rpartition(".")[2])
    return found


def reads(node: ast.AST, children: dict[str, str]) -> str:
    """The expression by which a node of the syntax tree reads the weight of a layer; empty where it does not."""
    if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load):
        owner = ast.unparse(node.value)
        name = owner.rpartition(".")[2]
        made_of = children.get(name, "") if owner == f"self.{name}" else ""
        other = OTHER_CLASS.search(made_of) if made_of else OTHER_NAME.search(name)
        # a name without a dot is the module itself, or a variable
        return "" if other or isinstance(node.value, ast.Name) else f"{owner}.weight"
    if isinstance(node, ast.Attribute) and node.attr == "dtype" and isinstance(node.value, ast.Call):
        asked = re.match(r"next\(.*?([\w.]+\.parameters\(\))", ast.unparse(node.value))
        return asked[1] if asked else ""
    if isinstance(node, ast.Call) and [keyword.arg for keyword in node.keywords] == ["input"]:
        called = ast.unparse(node.func)
        return f"{called}(input=)" if called.startswith("self.") else ""
    return ""


def places(path: Path) -> Iterator[str]:
    """``file: class: expression`` for every place in a file."""

    def visit(node: ast.AST, owner: str, function: str, children: dict[str, str]) -> Iterator[str]:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                yield from visit(part, part.name, "", layer_classes(part))
                continue
            within = function
            if isinstance(part, ast.FunctionDef):
                within = function or part.name
            elif function and not ONCE.fullmatch(function) and (expression := reads(part, children)):
                yield f"{path.stem}: {owner}: {expression}"
            yield from visit(part, owner, within, children)

    text = path.read_text(encoding="utf-8")
    if re.search(r"\.weight\b|\.parameters\(\)|\binput=", text):
        yield from visit(ast.parse(text), "", "", {})


def folder_of(library: str) -> Path:
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        pytest.skip(f"{library} is not installed")
    return Path(found.origin).parent


def files_of_diffusers(*parts: str) -> list[Path]:
    return [file for part in parts for file in sorted((folder_of("diffusers") / part).rglob("*.py"))]


@functools.cache
def files_of_transformers() -> list[Path]:
    """The models that a pipeline of diffusers has as a component."""
    names = {name for file in files_of_diffusers("pipelines", "modular_pipelines") for name in imported(file)}
    chosen = []
    for file in sorted((folder_of("transformers") / "models").glob("*/modeling_*.py")):
        if names.intersection(re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)):
            chosen.append(file)
    return chosen


def imported(file: Path) -> Iterator[str]:
    """The classes that a file imports from transformers; read without its syntax tree, which is slower."""
    for one, several in re.findall(
        r"^\s*from transformers[\w.]* import (?:([\w, ]+)|\(([^)]*)\))",
        file.read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        yield from re.findall(r"\w+", one or several)


def listed(reasons: dict[str, str]) -> dict[str, str]:
    """Place -> reason."""
    return {line.strip(): reason for reason, lines in reasons.items() for line in lines.strip().splitlines()}


def wildcard(place: str) -> str:
    return "*: *: " + place.split(": ", 2)[2]


def assert_all_known(files: list[Path], reasons: dict[str, str]) -> None:
    known = listed(reasons)
    found = {place for file in files for place in places(file)}
    new = sorted(place for place in found if place not in known and wildcard(place) not in known)
    assert not new, (
        "read a weight as if it were plain; look at each, and list it with its reason:\n" + "\n".join(new)
    )
    gone = set(known) - found - set(map(wildcard, found))
    assert not gone, "not there any more:\n" + "\n".join(sorted(gone))


def the_newest(*requirements: str) -> None:
    for requirement in requirements:
        if reason := unmet(requirement):
            pytest.skip(f"the lists are of the newest releases: {reason}")


def test_the_models_of_diffusers():
    the_newest("diffusers>=0.42.1")
    assert_all_known(files_of_diffusers("models", "hooks", "loaders"), MODELS)


@pytest.mark.long
def test_the_pipelines_of_diffusers():
    the_newest("diffusers>=0.42.1")
    assert_all_known(files_of_diffusers("pipelines", "modular_pipelines"), PIPELINES)


def test_the_text_encoders():
    the_newest("diffusers>=0.42.1", "transformers>=5.23.0")
    assert_all_known(files_of_transformers(), TEXT_ENCODERS)


@pytest.mark.parametrize(
    "place", [place for lists in (MODELS, TEXT_ENCODERS) for place in listed({KEPT: lists[KEPT]})]
)
def test_what_is_kept_out_of_quantization_is_kept_out(place):
    the_newest("diffusers>=0.42.1", "transformers>=5.23.0")
    name, _, expression = place.split(": ", 2)
    files = files_of_diffusers("models") + files_of_transformers()
    text = next(file for file in files if file.stem == name).read_text(encoding="utf-8")
    kept = re.search(r"_keep_in_fp32_modules = (\[[^]]*\])", text)
    layer = re.search(r"self\.(\w+)", expression)
    assert kept and layer and layer[1] in ast.literal_eval(kept[1])


def test_the_audio_codec_of_minimax_is_kept_out(gpu, tmp_path):
    the_newest("diffusers>=0.42.1", "bitsandbytes>=0.46")
    import torch
    from diffusers import AutoencoderKLMiniMaxH3Audio

    from tests.rig import models

    model = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=8, latent_dim=256, latent_channels=32, num_attention_heads=2, decoder_dim=256
    )
    folder = models.saved(model, tmp_path)
    for bits in (4, 8):
        loaded = models.load_quantized(type(model), folder, bits=bits)
        assert type(loaded.pre_block.attn.qkv) is torch.nn.Linear


def test_every_fix_that_is_named_is_there():
    named = {reason for lists in (MODELS, PIPELINES, TEXT_ENCODERS) for reason in lists if " " not in reason}
    assert named and named <= set(NAMES)


@pytest.mark.parametrize(
    "name", ["SanaWMLTX2Refiner: LTX2VideoTransformer3DModel", "Cosmos3AVAEAudioTokenizer"]
)
def test_the_first_parameter_is_of_no_linear_layer(name):
    """Of the models of pipelines that nothing else shows to be so."""
    the_newest("diffusers>=0.42.1")
    import diffusers
    import torch

    with torch.device("meta"):
        model = getattr(diffusers, name.rpartition(": ")[2])()
    first = next(name for name, _ in model.named_parameters())
    assert not isinstance(model.get_submodule(first.rpartition(".")[0]), torch.nn.Linear), first


def test_a_place_is_found(tmp_path):
    file = tmp_path / "made_up.py"
    file.write_text(
        "class Model(Module):\n"
        "    def __init__(self):\n"
        "        self.image_embeds = nn.Linear(1, 1)\n"
        "        self.first = nn.LayerNorm(1)\n"
        "        self.image_embeds.weight.data.zero_()\n"
        "    def forward(self, x):\n"
        "        x = self.image_embeds(x.to(self.image_embeds.weight.dtype)) + self.first.weight\n"
        "        def inner(): return F.linear(x, self.layers[0].weight)\n"
        "        dtype = next(iter(self.last.parameters())).dtype\n"
        "        return self.last(input=inner())\n"
    )
    assert sorted(place.split(": ", 2)[2] for place in places(file)) == [
        "self.image_embeds.weight",
        "self.last(input=)",
        "self.last.parameters()",
        "self.layers[0].weight",
    ]
