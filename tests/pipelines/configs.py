"""What makes a component tiny: by parameter name, by model class, and by pipeline where one class has several uses.

Every width is ``WIDTH`` (two heads of 32), which all quantization kernels accept. What no table names keeps the
default of the class, so channels of latents are those of the real models.
"""

from __future__ import annotations

from typing import Any

WIDTH = 64


def _names(text: str) -> list[str]:
    return text.split()


# parameter of a diffusers model -> value; sequences of rope dimensions get one of their length, see components.py
SHRUNK: dict[str, Any] = {
    **dict.fromkeys(
        _names("""
            num_layers num_single_layers num_refiner_layers num_mmdit_layers num_single_dit_layers
            mmdit_layers num_hidden_layers n_layers n_refiner_layers depth num_text_blocks
            num_visual_blocks num_text_layers num_layerwise_text_blocks num_refiner_text_blocks
            dit_depth nlayers layers_per_block num_res_blocks approximator_layers
            transformer_num_layers transformer_layers_per_block num_blocks_per_stage
            video_connector_num_layers audio_connector_num_layers num_lyric_encoder_hidden_layers
            num_timbre_encoder_hidden_layers num_attention_pooler_hidden_layers n_controlnet_blocks
            bottleneck_blocks motion_layers_per_block perceiver_num_layers
        """),
        1,
    ),
    **dict.fromkeys(
        _names("""
            num_attention_heads num_key_value_heads num_kv_heads n_heads n_kv_heads num_heads nheads
            dit_heads num_cross_attention_heads text_num_attention_heads text_num_key_value_heads
            audio_num_attention_heads num_key_value_attention_heads block_num_heads
            video_connector_num_attention_heads audio_connector_num_attention_heads n_head
            motion_num_attention_heads face_encoder_num_heads
        """),
        2,
    ),
    **dict.fromkeys(
        _names("""
            attention_head_dim head_dim cross_attention_head_dim audio_attention_head_dim
            linear_head_dim video_connector_attention_head_dim audio_connector_attention_head_dim
        """),
        32,
    ),
    **dict.fromkeys(
        _names("""
            hidden_size dim inner_dim model_dim dit_dim embed_dim token_dim joint_attention_dim
            cross_attention_dim caption_channels caption_projection_dim text_dim text_embed_dim
            text_embed_2_dim context_in_dim cap_feat_dim pooled_projection_dim encoder_hidden_size
            text_in_dim text_emb_dim text_hidden_dim in_text_dim in_text_dim2 text_encoder_dim
            dit_text_dim cond_embed_dim audio_cross_attention_dim cross_attention_dim_t5
            time_embed_dim time_dim freq_dim adaln_dim adaln_lora_dim condition_dim
            timestep_embed_dim timestep_guidance_channels approximator_hidden_dim cond_token_dim
            global_cond_dim embedding_dim cross_attention_input_dim global_states_input_dim
            llm_features_dim n_embd text_encoder_dim text_encoder_1_dim langauge_model_dim
            conditioning_dim output_dim redux_dim txt_in_features encoder_hidden_states_channels
            crossattn_proj_in_channels clip_embeddings_dim clip_img_dim audio_hidden_dim
            video_hidden_dim video_cross_attention_dim micro_cond_embed_dim model_channels
            img_context_dim_out
        """),
        WIDTH,
    ),
    **dict.fromkeys(
        _names("""
            intermediate_size ffn_dim ff_dim ffn_hidden_size text_intermediate_size
        """),
        2 * WIDTH,
    ),
    "norm_num_groups": 8,
    "conditioning_embedding_out_channels": (16, 32),
    "max_text_seq_length": 16,
    "text_len": 77,
    "text_len_t5": 256,
    "base_dim": 16,
    "decoder_base_dim": 16,
    "sample_width": 4,
    "sample_height": 4,
    "pos_embed_max_size": 64,
}

_UNET = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
    "num_attention_heads": None,
    "sample_size": 16,
}
_VAE = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "sample_size": 32,
}

# class of a diffusers model -> what differs from SHRUNK
MODELS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": _UNET,
    "ControlNetModel": {k: v for k, v in _UNET.items() if k not in ("up_block_types", "sample_size")},
    "ControlNetUnionModel": {
        **{k: v for k, v in _UNET.items() if k not in ("up_block_types", "sample_size")},
        "num_trans_channel": 32,
        "num_trans_head": 2,
        "num_proj_channel": 32,
        "conditioning_embedding_out_channels": (16, 32),
    },
    "AutoencoderKL": _VAE,
    "VQModel": {**_VAE, "latent_channels": 4},
    "AsymmetricAutoencoderKL": {},
    "AutoencoderKLFlux2": {**_VAE, "sample_size": 32},
    "AutoencoderKLTemporalDecoder": {
        k: _VAE[k] for k in ("block_out_channels", "down_block_types", "sample_size")
    },
    "UNet2DModel": {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "sample_size": 16,
    },
    "UNet3DConditionModel": {
        **_UNET,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "attention_head_dim": 32,
    },
    "I2VGenXLUNet": {
        **_UNET,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "attention_head_dim": 2,
        "num_attention_heads": 2,
    },
    "UNetSpatioTemporalConditionModel": {
        **_UNET,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "num_attention_heads": (2, 2),
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 96,
    },
    "MotionAdapter": {"block_out_channels": (32, 64), "motion_norm_num_groups": 8},
    "SparseControlNetModel": {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlockMotion", "CrossAttnDownBlockMotion"),
        "attention_head_dim": 2,
        "num_attention_heads": None,
    },
    "AudioLDM2UNet2DConditionModel": {
        **_UNET,
        "cross_attention_dim": (WIDTH, WIDTH),
    },
    "UNetFlatConditionModel": {
        **_UNET,
        "down_block_types": ("DownBlockFlat", "CrossAttnDownBlockFlat"),
        "up_block_types": ("CrossAttnUpBlockFlat", "UpBlockFlat"),
    },
    "Kandinsky3UNet": {
        "block_out_channels": (32, 64),
        "layers_per_block": 3,
        "groups": 8,
        "encoder_hid_dim": WIDTH,
        "time_embedding_dim": 64,
        "attention_head_dim": 8,
    },
    "ControlNetXSAdapter": {
        "block_out_channels": (16, 32),
        "base_block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "max_norm_num_groups": 8,
        "sample_size": 16,
        "use_linear_projection": False,
        "upcast_attention": False,
    },
    "DreamLiteUNetModel": {
        "block_out_channels": (32, 64, 64),
        "attention_head_dim": 2,
        "num_kv_heads": 1,
        "num_attention_heads": None,
    },
    "T2IAdapter": {"channels": [32, 64], "downscale_factor": 2},
    "AutoencoderTiny": {
        "encoder_block_out_channels": (16,) * 4,
        "decoder_block_out_channels": (16,) * 4,
        "num_encoder_blocks": (1, 1, 1, 1),
        "num_decoder_blocks": (1, 1, 1, 1),
    },
    "AutoencoderDC": {
        "encoder_block_out_channels": (32, 64),
        "decoder_block_out_channels": (32, 64),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "attention_head_dim": 32,
    },
    "AutoencoderKLAllegro": {"block_out_channels": (16, 32, 32, 32)},
    "AutoencoderKLCogVideoX": {"block_out_channels": (16, 32, 32, 32)},
    "AutoencoderKLMagvit": {"block_out_channels": [16, 32, 32, 32]},
    "AutoencoderKLHunyuanVideo": {"block_out_channels": (16, 32, 32, 32)},
    "AutoencoderKLHunyuanVideo15": {"block_out_channels": (16, 32, 32, 32, 64)},
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "block_out_channels": (64, 64, 64, 64, 64, 128),
        "spatial_compression_ratio": 32,
        "sample_size": 32,
    },
    "AutoencoderKLHunyuanImageRefiner": {"block_out_channels": (32, 64, 64, 64, 64)},
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
    },
    "AutoencoderKLCosmos": {
        "encoder_block_out_channels": (16, 32, 32, 32),
        "decode_block_out_channels": (16, 32, 32, 32),
    },
    "AutoencoderKLLTXVideo": {
        "block_out_channels": (16, 32, 32, 32),
        "decoder_block_out_channels": (16, 32, 32, 32),
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5,
    },
    "AutoencoderKLLTX2Video": {
        "block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (16, 32, 64),  # each level halves
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 4,
    },
    "AutoencoderKLLTX2Audio": {"ch_mult": (1, 1, 1)},
    "AutoencoderOobleck": {
        "encoder_hidden_size": 12,
        "decoder_channels": 12,
        "channel_multiples": [1, 2, 4],
        "downsampling_ratios": [1, 2, 4],
    },
    "PaellaVQModel": {"embed_dim": 16},
    "Transformer2DModel": {},
    "AllegroTransformer3DModel": {"attention_head_dim": 96, "cross_attention_dim": 192},  # three axes of 32
    "CogVideoXTransformer3DModel": {"sample_frames": 9},
    "CogView4Transformer2DModel": {"sample_size": 16, "pos_embed_max_size": 16, "rope_axes_dim": (256, 256)},
    "CogView3PlusTransformer2DModel": {"sample_size": 16},
    "PriorTransformer": {"num_embeddings": 77},
    "ZImageControlNetModel": {
        "control_layers_places": [0],
        "control_refiner_layers_places": [0],
        "control_in_dim": 16,
    },
    "AnimaTextConditioner": {"source_dim": WIDTH, "target_dim": WIDTH, "min_sequence_length": 16},
    "WanAnimateTransformer3DModel": {
        "image_dim": WIDTH,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16,
        "inject_face_latents_blocks": 1,
    },
    "Flux2Transformer2DModel": {"joint_attention_dim": 3 * WIDTH},
    "Flux3Transformer2DModel": {"joint_attention_dim": 3 * WIDTH},
    "WanVACETransformer3DModel": {"vace_layers": [0]},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2, "sample_size": 16},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2, "sample_size": 16},
    "LatteTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 8,
        "patch_size": 2,
        "sample_size": 16,
        "caption_channels": WIDTH,
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "video_length": 2,
    },
    "PixArtTransformer2DModel": {"sample_size": 16, "caption_channels": WIDTH},
    "OmniGenTransformer2DModel": {
        "vocab_size": 512,
        "pad_token_id": 0,
        "rope_scaling": {"short_factor": [1.0] * 16, "long_factor": [1.0] * 16},
    },
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "caption_channels": (WIDTH, WIDTH),
        "text_emb_dim": 2 * WIDTH,
        "llama_layers": (0, 1),
        "axes_dims_rope": (16, 8, 8),
        "num_routed_experts": 4,
        "max_resolution": (16, 16),
    },
    "LTX2VideoDiffusionDecoderModel": {
        "decoder_head_dim": 32,
        "decoder_stage_channels": (WIDTH,) * 5,
        "decoder_stage_depths": (1,) * 5,
        "decoder_stage_kernels": ((2, 2, 2),) * 4,
        "decoder_stage5_kernel": (2, 2, 2),
        "decoder_upsample_channel_reductions": (1,) * 4,
        "decoder_upsample_strides": ((1, 1, 1), (2, 1, 1), (2, 1, 1), (2, 2, 2)),
    },
    "AutoencoderKLMiniMaxH3": {
        "block_out_channels": (16,) * 6,
        "decoder_num_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_attention_head_dim": 32,
    },
    "AutoencoderKLMiniMaxH3Audio": {
        "encoder_dim": 8,
        "encoder_rates": (2, 2),
        "latent_dim": WIDTH,
        "decoder_dim": 32,
        "decoder_rates": (2, 2),
        "decoder_kernel_sizes": (4, 4),
        "resblock_kernel_sizes": (3,),
        "resblock_dilation_sizes": ((1,),),
        "latents_mean": [0.0] * 32,
        "latents_std": [1.0] * 32,
    },
    "MiniMaxH3Transformer3DModel": {"time_embed_hidden_dim": WIDTH, "rope_freq_dim": 4},
    "LTX2TextConnectors": {
        "text_proj_in_factor": 3,
        "video_connector_num_learnable_registers": 16,
        "audio_connector_num_learnable_registers": 16,
    },
    "LTX2Vocoder": {"hidden_channels": 64},
    "LTXLatentUpsamplerModel": {"mid_channels": 64},
    "LTX2LatentUpsamplerModel": {"mid_channels": 64},
    "StableAudioProjectionModel": {"min_value": 0, "max_value": 32},
    "LearnedClassifierFreeSamplingEmbeddings": {"learnable": False},
    "Kandinsky5Transformer3DModel": {"in_visual_dim": 16, "out_visual_dim": 16, "axes_dims": (8, 12, 12)},
    "StableCascadeUNet": {
        "block_out_channels": (32, 64),
        "num_attention_heads": (2, 2),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "clip_text_pooled_in_channels": WIDTH,
    },
    "WuerstchenPrior": {"c_in": 16, "c": WIDTH, "c_cond": WIDTH, "c_r": WIDTH, "depth": 1, "nhead": 2},
    "WuerstchenDiffNeXt": {
        "c_cond": WIDTH,
        "c_hidden": [32, 64],
        "nhead": [-1, 2],
        "blocks": [1, 1],
        "level_config": ["CT", "CTA"],
        "clip_embd": WIDTH,
        "inject_effnet": [False, True],
    },
    "UVit2DModel": {
        "vocab_size": 32,
        "codebook_size": 32,
        "in_channels": WIDTH,
        "block_out_channels": WIDTH,
        "micro_cond_encode_dim": 16,
        "micro_cond_embed_dim": 80,
        "sample_size": 16,
    },
    "Kandinsky6SRVAE": {
        "encoder_block_out_channels": (16, 32, 32, 32, 32),
        "decoder_block_out_channels": (16, 32, 32, 32, 32),
        "layers_per_block": 1,
    },
    "Kandinsky6SRLatentUpscalerBank": {
        "stage_channels": (32, 32, 32),
        "num_pre_blocks": 1,
        "num_mid_blocks": 1,
    },
    "LongCatAudioDiTVae": {
        "channels": 32,
        "c_mults": [1, 2],
        "strides": [2, 4],
        "downsampling_ratio": 8,
        "encoder_latent_dim": 128,
    },
    "AceStepAudioTokenizer": {"fsq_dim": WIDTH},
    "LTX2DurationHead": {"pooler_hidden_dim": WIDTH},
    "PRXTransformer2DModel": {"axes_dim": [16, 16], "hidden_size": WIDTH, "num_heads": 2},
    "LuminaNextDiT2DModel": {"num_kv_heads": 2},
    "HunyuanVideo15Transformer3DModel": {"image_embed_dim": WIDTH},
    "QwenImage21Transformer2DModel": {},
    "AutoencoderKLQwenImage21": {"decoder_base_dim": 16},
    "DiTTransformer2DModel": {"sample_size": 16, "num_embeds_ada_norm": 1000},
}

# parameter of a transformers config -> value, wherever the config (or a part of it) has such a parameter
SHRUNK_CONFIG: dict[str, Any] = {
    **dict.fromkeys(
        _names("""
            hidden_size d_model n_embd projection_dim embed_dim out_hidden_size
        """),
        WIDTH,
    ),
    **dict.fromkeys(["intermediate_size", "d_ff"], 2 * WIDTH),
    **dict.fromkeys(
        _names("""
            num_layers num_hidden_layers n_layer depth
        """),
        2,
    ),
    **dict.fromkeys(
        _names("""
            num_attention_heads num_heads n_head num_key_value_heads
        """),
        2,
    ),
    **dict.fromkeys(["d_kv", "head_dim"], 32),
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "image_size": 32,
    "patch_size": 8,
}

_QWEN_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
_QWEN_TEXT = {
    "rope_parameters": _QWEN_ROPE,
    "rope_scaling": _QWEN_ROPE,
}  # its name since transformers 5, and before
_QWEN_VISION = {
    "fullatt_block_indexes": [1],
    "patch_size": 14,
    "out_hidden_size": WIDTH,
    "deepstack_visual_indexes": [1],
}
_IMAGE_TOKENS = {
    "image_token_id": 8,
    "video_token_id": 9,
    "vision_start_token_id": 6,
    "vision_end_token_id": 7,
}
_QWEN = {"text_config": _QWEN_TEXT, "vision_config": _QWEN_VISION, **_IMAGE_TOKENS}

# class of a transformers model -> what differs from SHRUNK_CONFIG; parts of a config by their name
CONFIGS: dict[str, dict[str, Any]] = {
    "CLIPTextModel": {"max_position_embeddings": 77},
    "CLIPTextModelWithProjection": {"max_position_embeddings": 77},
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLModel": _QWEN,
    "Qwen2_5_VLTextModel": _QWEN_TEXT,
    "ChatGLMModel": {
        "original_rope": True,
        "use_cache": True,  # the checkpoint's; its class reads it, and has no default
        "padded_vocab_size": 512,
        "ffn_hidden_size": 128,
        "kv_channels": 32,
        "hidden_size": WIDTH,
        "num_layers": 2,
        "num_attention_heads": 2,
    },
    "DPTForDepthEstimation": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16,
    },
    "MultilingualCLIP": {"transformerDimensions": WIDTH, "numDims": WIDTH},
    "LlamaModel": {"num_hidden_layers": 4},
    "LlamaForCausalLM": {"num_hidden_layers": 2},
    "SmolLM3ForCausalLM": {
        "no_rope_layers": [1, 1],
        "vocab_size": 128256,
    },  # the pipeline knows a token by its number
    "LlavaForConditionalGeneration": {"pad_token_id": 0, "image_token_index": 10},
    "PaintByExampleImageEncoder": {"config_class": "CLIPVisionConfig"},
    "GlmImageForConditionalGeneration": {
        "text_config": {**_QWEN_TEXT, "vision_vocab_size": 512},
        "vq_config": {"num_embeddings": 512},
    },
    "Qwen3_5ForConditionalGeneration": {
        **_QWEN,
        "text_config": {**_QWEN_TEXT, "layer_types": ["linear_attention", "full_attention"]},
    },
    "T5Gemma2Encoder": {"text_config": {"dropout_rate": 0.0}},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "Mistral3ForConditionalGeneration": {"image_token_index": 8},
    "SpeechT5HifiGan": {
        "upsample_initial_channel": 16,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
        "normalize_before": False,
    },
    "ClapModel": {
        "audio_config": {
            "num_attention_heads": [2, 2],
            "depths": [1, 1],
            "hidden_size": 192,
            "patch_embeds_hidden_size": 96,
            "num_mel_bins": 16,
        }
    },
}

# What a constructor names only by a base class
CHOSEN: dict[str, str] = {
    "Gemma2PreTrainedModel": "Gemma2Model",
    "GemmaPreTrainedModel": "GemmaModel",
    "PreTrainedModel": "Qwen3Model",
}

_XL_UNET = {
    "cross_attention_dim": 2 * WIDTH,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
}
_XL_CONTROL = {key: _XL_UNET[key] for key in _XL_UNET}
_PROTEIN_STEPS = {
    "schedule_mode": "log",
    "noise_mode": "1/t",
    "tsr_k": 1.0,
    "tsr_sigma": 1.0,
    "tail_steps": 1,
}
_VAE_8 = {  # four levels: a factor of 8, which some pipelines take for granted
    "block_out_channels": (16, 16, 32, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_SUPER_RESOLUTION = {
    "in_channels": 6,
    "out_channels": 3,
    "sample_size": 32,
    "down_block_types": ("ResnetDownsampleBlock2D",) * 2,
    "up_block_types": ("ResnetUpsampleBlock2D",) * 2,
    "add_attention": False,
}
_LATENTS_16 = {"latent_channels": 16, "shift_factor": 0.0, "scaling_factor": 1.0}

# pattern over pipeline names -> component -> parameters; all that match apply, the last one wins
FAMILIES: dict[str, dict[str, Any]] = {
    "Flux|StableDiffusion3|CogView|HiDream|Lumina2|ZImage|Chroma|Bria|LongCatImage|Ovis|Glm|PRX|VisualCloze"
    "|Kandinsky5.2I": {"vae": _LATENTS_16},
    ".*(XL|Kolors)(?!.*I2VGen)": {
        "unet": _XL_UNET,
        "controlnet": _XL_CONTROL,
        "adapter": {"adapter_type": "full_adapter_xl", "channels": [32, 64], "downscale_factor": 4},
    },
    ".*XLControlNetXS": {"controlnet": {"cross_attention_dim": 2 * WIDTH}},
    "StableDiffusion3": {
        "transformer": {"pooled_projection_dim": 2 * WIDTH},
        "controlnet": {"pooled_projection_dim": 2 * WIDTH},
    },
    "StableDiffusion3PAG|HunyuanDiTPAG|PixArtSigmaPAG": {"pag_applied_layers": "blocks.0"},
    "SanaPAG": {"pag_applied_layers": "transformer_blocks.0"},
    ".*InstructPix2Pix": {"unet": {"in_channels": 8}},
    "StableDiffusionXLInstructPix2Pix": {"unet": {**_XL_UNET, "in_channels": 8}},
    "PaintByExample|PIA": {"unet": {"in_channels": 9}},
    "StableDiffusionUpscale": {"unet": {"in_channels": 7, "num_class_embeds": 1000}},
    "StableDiffusionDepth2Img": {"unet": {"in_channels": 5}},
    "AltDiffusion": {"text_encoder": {"project_dim": WIDTH}},
    "Amused": {
        "scheduler": {"mask_token_id": 31},
        "vqvae": {"latent_channels": WIDTH, "num_vq_embeddings": 32, "lookup_from_codebook": True},
    },
    "BriaFiboPipeline|BriaFiboEdit": {
        "vae": {"latent_channels": 16, "scale_factor_spatial": 16},
        "transformer": {"in_channels": 16, "text_encoder_dim": WIDTH, "joint_attention_dim": 2 * WIDTH},
    },
    "BriaFiboPipeline": {"vae": {}, "transformer": {}},
    "ChronoEdit": {"transformer": {"in_channels": 36, "image_dim": WIDTH, "added_kv_proj_dim": WIDTH}},
    "WanImageToVideo|SkyReelsV2ImageToVideo|Wan22Image2Video": {"transformer": {"in_channels": 36}},
    "Wan22Image2Video": {"transformer_2": {"in_channels": 36}},
    "Wan22Vace": {"transformer": {"class": "WanVACETransformer3DModel"}},
    "WanImage2Video": {
        "transformer": {"in_channels": 36, "image_dim": WIDTH, "added_kv_proj_dim": WIDTH},
    },
    "WanAnimate2": {
        # Its transformer takes 1280 features of an image.
        "image_encoder": {"image_size": 224, "patch_size": 32, "hidden_size": 1280},
    },
    "CogVideoXImageToVideo|CogVideoXFunControl": {"transformer": {"in_channels": 32}},
    "CogView4Control": {"transformer": {"in_channels": 32}},
    "Cosmos(TextTo|VideoTo)": {"transformer": {"in_channels": 16, "extra_pos_embed_type": "learnable"}},
    "CosmosVideoTo": {"dtype": "float32"},  # avg_pool3d on a CPU
    "Cosmos2": {"scheduler": {"use_karras_sigmas": True}},  # the others begin at zero, and it divides by them
    "CosmosVideoTo|Cosmos2VideoTo": {"transformer": {"in_channels": 17}},
    "CycleDiffusion": {
        "scheduler": {"set_alpha_to_one": False, "clip_sample": False},
        "dtype": "float32",
    },
    "DanceDiffusion": {
        "unet": {"sample_size": 512, "sample_rate": 16000, "extra_in_channels": 16, "time_embedding_dim": 16},
        "scheduler": {"class": "IPNDMScheduler"},
    },
    "DiT": {"transformer": {"in_channels": 4, "out_channels": 8}},
    "EasyAnimate": {
        "text_encoder": {"class": "Qwen2VLForConditionalGeneration"},
        "transformer": {"in_channels": 16},
    },
    "Cosmos3Distilled": {"distilled_sigmas": (0.9, 0.5)},
    "Cosmos3(Omni|Distilled)": {"transformer": {"latent_channel": 16, "patch_latent_dim": WIDTH}},
    "EasyAnimate(Control|Inpaint)": {"transformer": {"in_channels": 33}},
    "FluxControl(Pipeline|Img2Img|Inpaint)": {"transformer": {"in_channels": 128, "out_channels": 64}},
    "FluxFill|VisualCloze": {"transformer": {"in_channels": 144, "out_channels": 64}},
    "Flux[23]": {"vae": {"latent_channels": 32, "shift_factor": None}},
    # By default the noise's covariance is singular: whether it can be factored depends on the processor.
    "HeliosPyramid": {"scheduler": {"gamma": 0.3}},
    "HeliosPyramidDistilled": {"scheduler": {"class": "HeliosDMDScheduler"}},
    "HeliosPipeline": {"scheduler": {"stages": 1}},
    "HunyuanImagePipeline": {"vae": {"scaling_factor": 0.5}},
    "HunyuanImageRefiner": {
        "transformer": {
            "in_channels": 128,
            "out_channels": 64,
            "patch_size": (1, 1, 1),
            "rope_axes_dim": (8, 12, 12),
        }
    },
    "Ideogram4": {
        "text_encoder": {"class": "Qwen3VLModel"},
        "transformer": {"llm_features_dim": 13 * WIDTH, "mrope_section": (6, 5, 5)},
        "unconditional_transformer": {"llm_features_dim": 13 * WIDTH, "mrope_section": (6, 5, 5)},
    },
    "HunyuanSkyreels": {"transformer": {"in_channels": 32}},
    "HunyuanVideoFramepack": {
        "transformer": {"has_clean_x_embedder": True, "has_image_proj": True, "image_proj_dim": WIDTH}
    },
    "HunyuanVideoImageToVideo": {  # its prompt has 576 tokens for an image
        "transformer": {"image_condition_type": "token_replace"},
        "text_encoder": {"vision_config": {"image_size": 336, "patch_size": 14}},
        "image_processor": {
            "size": {"height": 336, "width": 336},
            "crop_size": {"height": 336, "width": 336},
        },
    },
    "IF(Pipeline|Img2ImgPipeline|InpaintingPipeline)": {
        "unet": {"in_channels": 3, "out_channels": 6, "resnet_time_scale_shift": "scale_shift"},
        "scheduler": {"variance_type": "learned_range"},
    },
    "IF.*SuperResolution": {
        "unet": {
            "in_channels": 6,
            "out_channels": 6,
            "class_embed_type": "timestep",
            "resnet_time_scale_shift": "scale_shift",
        },
        "scheduler": {"variance_type": "learned_range"},
    },
    "Kandinsky(?!3|5|6)": {
        "unet": {
            "out_channels": 8,
            "addition_embed_type": "image",
            "encoder_hid_dim_type": "image_proj",
            "encoder_hid_dim": WIDTH,
            "cross_attention_dim": WIDTH,
        },
        "movq": {"norm_type": "spatial", "num_vq_embeddings": 32},
    },
    "Kandinsky(?!V|3|5|6)": {
        "unet": {"addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"},
    },
    "Kandinsky.*Inpaint": {"unet": {"in_channels": 9}},
    "KandinskyV22Controlnet": {
        "unet": {"in_channels": 8, "addition_embed_type": "image_hint"},
    },
    "Kandinsky.*Prior": {"dtype": "float32"},
    "Kandinsky3": {"movq": {}},
    "Kandinsky5": {"dtype": "float32"},
    "Kandinsky5(I2V|I2I)": {"transformer": {"visual_cond": True}},
    "Kandinsky5I2I": {"vae": _VAE_8},
    "AceStep": {  # it listens to 30 seconds of silence
        "vae": {"downsampling_ratios": [2, 4, 4, 8, 8], "channel_multiples": [1, 1, 1, 1, 1]}
    },
    "LDMSuperResolution": {"unet": {"in_channels": 6, "out_channels": 3}, "vqvae": {"latent_channels": 3}},
    "BriaFibo2": {"vae": {"latent_channels": 32}, "transformer": {"cap_feat_dim": 3 * WIDTH}},
    "OmniGen": {"vae": _VAE_8},
    "MotifVideoImage2Video": {"transformer": {"image_embed_dim": WIDTH}},
    "ConsisID": {  # with the parts that see a face
        "transformer": {
            "num_attention_heads": 3,
            "in_channels": 32,
            "use_rotary_positional_embeddings": True,
            "sample_frames": 9,
            "is_train_face": True,
            "is_kps": True,
            "cross_attn_interval": 1,
            "cross_attn_dim_head": 32,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": WIDTH,
            "LFE_vit_dim": WIDTH,
            "LFE_depth": 2,
            "LFE_dim_head": 32,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 4,
            "LFE_output_dim": WIDTH,
            "LFE_num_scale": 2,
        }
    },
    "Motif": {"guider": {"class": "ClassifierFreeGuidance"}},
    "Krea2": {"text_encoder_select_layers": (1,) * 12, "transformer": {"num_text_layers": 12}},
    "LucyEdit": {"dtype": "float32", "transformer": {"in_channels": 32}},
    "Marigold": {"unet": {"in_channels": 8}},
    "Kandinsky6TI2VA": {
        "transformer": {"in_audio_dim": 40, "out_audio_dim": 40},
        "audio_vae": {"hidden_channels": 32, "layers_per_block": 1},
        "vocoder": {"upsample_initial_channel": 64},
    },
    "Kandinsky6SR": {
        "transformer": {"out_visual_dim": 64, "tile_sizes": ((128, 128),)},
        "latent_upscaler": {},
    },
    "Kolors": {
        "tokenizer": {"positions": True},
        "unet": {"cross_attention_dim": WIDTH},
    },
    "(Audio|Music)LDM": {
        "vae": {"in_channels": 1, "out_channels": 1},
        "vocoder": {"model_in_dim": 8},
    },
    "MusicLDM": {"text_encoder": {"class": "ClapModel"}},
    # AutoModel and AutoModelForCausalLM before 0.39
    "ErnieImage": {"text_encoder": {"class": "Mistral3Model"}, "pe": {"class": "Ministral3ForCausalLM"}},
    "AudioLDM2": {
        "unet": {
            "cross_attention_dim": ((None, WIDTH, WIDTH),) * 2,
            "class_embed_type": None,
            "class_embeddings_concat": False,
        }
    },
    "PRX": {"text_encoder": {"class": "T5GemmaEncoderModel"}},
    "PNDM": {"scheduler": {"skip_prk_steps": True}},
    "UnCLIP": {
        "dtype": "float32",  # bicubic interpolation on a CPU
        "prior": {"num_embeddings": 77},
        "decoder": {
            "in_channels": 3,
            "out_channels": 6,
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            "attention_head_dim": 32,
            "resnet_time_scale_shift": "scale_shift",
            "class_embed_type": "identity",
        },
        "text_proj": {"time_embed_dim": 2 * WIDTH},
        "super_res_first": _SUPER_RESOLUTION,
        "super_res_last": _SUPER_RESOLUTION,
        "prior_scheduler": {"variance_type": "fixed_small_log", "prediction_type": "sample"},
        "decoder_scheduler": {"variance_type": "learned_range"},
        "super_res_scheduler": {"variance_type": "fixed_small_log"},
    },
    "UniDiffuser": {
        "text_decoder": {
            "prefix_length": 77,
            "prefix_inner_dim": WIDTH,
            "prefix_hidden_dim": WIDTH,
            "vocab_size": 512,
            "n_layer": 1,
            "n_inner": 2 * WIDTH,
        },
        "unet": {
            "text_dim": WIDTH,
            "clip_img_dim": WIDTH,
            "num_text_tokens": 77,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu",
            "norm_type": "layer_norm",
            "block_type": "unidiffuser",
            "pre_layer_norm": False,
            "use_patch_pos_embed": False,
            "ff_final_dropout": True,
        },
    },
    "VQDiffusion": {
        "dtype": "float32",
        "transformer": {
            "num_vector_embeds": 33,
            "sample_size": 16,
            "num_embeds_ada_norm": 100,
            "attention_bias": True,
        },
        "vqvae": {"num_vq_embeddings": 32, "latent_channels": 4, "vq_embed_dim": 4},
        "scheduler": {"num_vec_classes": 33},
    },
    "ShapE": {
        "prior": {
            "embedding_dim": WIDTH,
            "num_embeddings": 32,
            "embedding_proj_dim": WIDTH,
            "time_embed_dim": 2 * WIDTH,
            "clip_embed_dim": 2 * WIDTH,
            "additional_embeddings": 0,
            "time_embed_act_fn": "gelu",
            "norm_in_type": "layer",
            "encoder_hid_proj_type": None,
            "added_emb_type": None,
        },
        "shap_e_renderer": {
            "param_shapes": ((8, 93), (8, 8), (8, 8), (8, 8)),
            "d_latent": WIDTH,
            "d_hidden": 8,
            "n_output": 12,
        },
        "scheduler": {
            "beta_schedule": "exp",
            "prediction_type": "sample",
            "use_karras_sigmas": True,
            "clip_sample": True,
        },
    },
    "ShapEImg2Img": {"prior": {"embedding_proj_norm_type": "layer", "num_embeddings": 32}},
    "LLaDA2": {"model": {"class": "LlamaForCausalLM"}, "tokenizer": {"class": "PreTrainedTokenizerFast"}},
    "DiffusionGemma": {
        "model": {
            "class": "DiffusionGemmaForBlockDiffusion",
            "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": WIDTH},
        },
        "processor": {"class": "PreTrainedTokenizerFast"},
    },
    "MiniMaxH3": {"text_encoder": {"text_config": {"num_hidden_layers": 51}}},  # it asks for the fiftieth
    "MiniMaxMusic3": {
        "language_model": {"vocab_size": 151675 + 16384},  # it knows its audio tokens by their numbers
        "rvq_depth_decoder": {"audio_vocab_size": 64},
        "condition_encoder": {"condition_hidden_dim": WIDTH, "out_dim": WIDTH},
        "transformer": {"ff_inner_dim": 2 * WIDTH, "rotary_dim": 16, "fourier_embedding_dim": 16},
        "vocoder": {"decoder_input_dim": 16, "decoder_hidden_dim": 64},
    },
    "LTX2VideoDiffusionDecode": {"scheduler": {"class": "FlowMatchEulerDiscreteScheduler"}},
    "LTX2DFR": {"transformer": {"use_keyframes_abs_pos_embedding": True}},
    "LTX2DFRTemporalRefine": {
        "scheduler": {"eta": 0.5},
        "temporal_latent_upsampler": {"spatial_upsample": False, "temporal_upsample": True},
    },
    "LDMPipeline": {"unet": {"in_channels": 4, "out_channels": 4}},
    "LDMTextToImage": {"unet": {"class": "UNet2DConditionModel"}},
    "LatentConsistency": {"unet": {"time_cond_proj_dim": WIDTH}},
    "LEditsPP": {
        "scheduler": {
            "class": "DPMSolverMultistepScheduler",
            "algorithm_type": "sde-dpmsolver++",
            "solver_order": 2,
        }
    },
    "LEditsPPPipelineStableDiffusion$": {  # attention maps of a fourth of the latents' size
        "unet": {
            "block_out_channels": (32, 64, 64),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        }
    },
    "I2VGenXL": {"unet": {"num_attention_heads": 2, "cross_attention_dim": WIDTH}},
    "HunyuanDiT": {"vae": _VAE_8},
    "Cosmos(?!2_5)|Anima": {"transformer": {"concat_padding_mask": False}},  # else they need torchvision
    "Cosmos2_5": {
        "transformer": {
            "in_channels": 17,
            "extra_pos_embed_type": None,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 2 * WIDTH,  # of all layers of the text encoder
        }
    },
    "Cosmos2_5_Transfer": {
        "transformer": {
            "controlnet_block_every_n": 1,
            "img_context_dim_in": WIDTH,
            "img_context_num_tokens": 16,
        },
        "controlnet": {
            "img_context_dim_in": WIDTH,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 2 * WIDTH,
        },
    },
    "Flux2Pipeline": {"tokenizer": {"class": "PreTrainedTokenizerFast"}},
    "HunyuanVideo15ImageToVideo": {"transformer": {"target_size": 32}},
    "NucleusMoE": {"transformer": {"out_channels": 16, "num_experts": 4}},
    "QwenImageControlNetInpaint": {"controlnet": {"extra_condition_channels": 4}},
    "Sana(Image|Video)": {"vae": {"class": "AutoencoderKLWan"}},
    "SanaSprint": {"scheduler": {"class": "SCMScheduler"}, "transformer": {"guidance_embeds": True}},
    "SanaWMLTX2Refiner": {"text_max_sequence_length": 64},
    "SkyReelsV2ImageToVideo": {"transformer": {"image_dim": WIDTH, "added_kv_proj_dim": WIDTH}},
    "StableAudioPipeline": {"transformer": {"global_states_input_dim": 2 * WIDTH}},
    "StableCascade": {
        "prior": {"clip_image_in_channels": WIDTH, "clip_text_in_channels": WIDTH},
        "prior_prior": {"clip_image_in_channels": WIDTH, "clip_text_in_channels": WIDTH},
        "decoder": {
            "in_channels": 4,
            "out_channels": 4,
            "effnet_in_channels": 16,
            "pixel_mapper_in_channels": 3,
            "patch_size": 2,
        },
    },
    "StableDiffusion3ControlNetInpainting": {"controlnet": {"extra_conditioning_channels": 1}},
    # What a ControlNet adds goes into all but the last block, or the first, or into the second half.
    "(StableDiffusion3|Sana)ControlNet": {"transformer": {"num_layers": 2}},
    "HunyuanDiTControlNet": {"transformer": {"num_layers": 4}, "controlnet": {"transformer_num_layers": 4}},
    "StableDiffusionLDM3D": {"vae": {"in_channels": 6, "out_channels": 6}},  # colours and depth
    "StableUnCLIP": {
        "unet": {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 2 * WIDTH}
    },
    "RFD4Proteina": {
        "transformer": {
            "nlayers": 2,  # the first one is followed by an update of the pairs
            "dim_cond": WIDTH,
            "pair_repr_dim": WIDTH,
            "tri_mult_c": WIDTH,
            "t_emb_dim": WIDTH,
        },
        "vae": {
            "dim_cond": WIDTH,
            "pair_repr_dim": WIDTH,
            "atom37_mask": [[True] * 37] * 147,  # of each residue
            "allowed_residue_types": [[True] * 147] * 7,  # of each type of tokens
        },
        "bb_ca_scheduler": _PROTEIN_STEPS,
        "local_latents_scheduler": _PROTEIN_STEPS,
        "recycle_depths": [1, 2],
    },
    "ScoreSdeVe": {"scheduler": {"sigma_max": 1.0}},  # else the noise is all
    "StableDiffusionAdapter": {
        "unet": {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        }
    },
    ".*ControlNetXS": {"unet": {"layers_per_block": 2}},
    "StableDiffusionGLIGENPipeline": {"unet": {"attention_type": "gated"}},
    "StableDiffusionGLIGENText": {
        "unet": {"attention_type": "gated-text-image"},
        "image_project": {"hidden_size": WIDTH},
    },
    "StableDiffusionLatentUpscale": {
        "unet": {"in_channels": 8, "out_channels": 5, "time_cond_proj_dim": 192}
    },
    "VisualCloze": {"resolution": 32},
    "VersatileDiffusionPipeline": {  # whose annotations are older than the pipelines that it makes
        "text_encoder": {"class": "CLIPTextModelWithProjection"},
        "image_encoder": {"class": "CLIPVisionModelWithProjection"},
        "text_unet": {
            "class": "diffusers.pipelines.deprecated.versatile_diffusion.modeling_text_unet.UNetFlatConditionModel"
        },
    },
    "QwenImage21": {"processor": {"tokenizer": {"framed": False}}},
    "GlmImage": {"vae": {**_VAE_8, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}},
    "Flux3Distilled": {"transformer": {"flow_map": True}},
    "Flux3": {
        "prompt_upsampler_processor": {"class": "Qwen3VLProcessor"},
        "tokenizer": {"class": "Qwen3VLProcessor"},
    },
    "ZImageControlNetInpaint": {"controlnet": {"control_in_dim": 33}},
    "ZImageOmni": {"siglip": {"patch_size": 16}, "transformer": {"siglip_feat_dim": WIDTH}},
    "StableDiffusionModelEditing": {"scheduler": {"class": "DDIMScheduler"}},
    "StableDiffusionParadigms": {"scheduler": {"class": "DDIMParallelScheduler"}},
    "StableVideoDiffusion": {"image_encoder": {"image_size": 224, "patch_size": 32}},
    "AudioDiffusion": {
        "dtype": "float32",
        "vqvae": {"in_channels": 1, "out_channels": 1},
        # librosa inverts a picture of the usual size for 8 to 30 seconds.
        "mel": {"x_res": 32, "y_res": 32, "n_fft": 64, "hop_length": 16, "n_iter": 1},
    },
    "DDPM|DDIM|PNDM|RePaint|ScoreSde|KarrasVe|Consistency|LDM": {"dtype": "float32"},
}

# What differs with older releases: requirement -> the same, where it is met
OLDER: dict[str, dict[str, dict[str, Any]]] = {
    "diffusers<0.41": {
        # Upstream gave their VAE float32, whatever its dtype: RuntimeError "Input type (float) and bias type
        # (c10::BFloat16) should be the same".
        "(StableVideoDiffusion|SkyReelsV2DiffusionForcingImage|(SkyReelsV2DiffusionForcing|Wan)VideoTo)": {
            "dtype": "float32"
        },
    },
    "diffusers<0.34": {
        "WanImageToVideo": {  # which asks for an image encoder
            "dtype": "float32",
            "transformer": {"image_dim": WIDTH, "added_kv_proj_dim": WIDTH},
        },
    },
    "diffusers<0.32": {  # which did not say what these take
        "LDMTextToImage": {"bert": {"class": "BertModel"}},
        "StableCascade(Combined|Decoder)": {
            "text_encoder": {"class": "CLIPTextModelWithProjection"},
            "prior_text_encoder": {"class": "CLIPTextModelWithProjection"},
        },
        "StableUnCLIPPipeline": {"text_encoder": {"class": "CLIPTextModel"}},
        "(DDIM|DDPM|RePaint)Pipeline": {
            "unet": {"class": "UNet2DModel"},
            "scheduler": {"class": "DDIMScheduler"},
        },
        "(DDPM|RePaint)Pipeline": {"scheduler": {"class": "DDPMScheduler"}},
        "RePaintPipeline": {"scheduler": {"class": "RePaintScheduler"}},
        "DanceDiffusion": {
            "unet": {"class": "UNet1DModel"},
            "scheduler": {"class": "IPNDMScheduler"},
        },
        "LuminaText2Img": {"text_encoder": {"class": "GemmaModel"}},
        "HunyuanDiT": {
            "text_encoder_2": {"class": "T5EncoderModel"},
            "tokenizer_2": {"class": "T5Tokenizer"},
        },
    },
}
