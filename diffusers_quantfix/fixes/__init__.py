"""The fixes, one file each, and the index by which the watcher knows them.

The index repeats two facts of the declarations, so that a start of the interpreter reads one file instead of all;
a test compares them.

A new fix, in a clone:

1. ``python -m tests.new_fix ID --target MODULE`` writes the line of the index and four stubs, and prints what is to be
   filled in; ``--help`` says what else it takes.  The tests fail until nothing says FILL IN any more.
2. The test, ``tests/fixes/test_ID.py``: do what a user does and assert what is right.  It must be red without us:
   ``python -m pytest tests/fixes/test_ID.py --side bare`` passes when it fails with upstream's own error.
3. The fix, ``fixes/LIBRARY/NAME.py``: ``broken`` finds the defect in the code that is there, ``patch`` writes through
   its draft.  ``python -m pytest tests/fixes/test_ID.py`` is green.
4. The case, ``verify/cases/ID.py``: the same situation for ``python -m diffusers_quantfix verify ID``, without pytest.
5. The line of CHANGELOG.md: what works now, without versions.
6. ``python -m tests.upstream --cells all --fixes ID --write`` proves the claimed range, release by release, and writes
   the generated pages; ``python -m tests.upstream.tables --write`` writes the pages without running anything.
"""

from __future__ import annotations

# id -> (file below this package, target module)
INDEX: dict[str, tuple[str, str]] = {
    "accelerate-8bit-offload-state": ("accelerate.eight_bit_offload_state", "accelerate.hooks"),
    "accelerate-attention-offload": ("accelerate.attention_offload", "accelerate.hooks"),
    "accelerate-fsdp-optimizer-shards": ("accelerate.fsdp_optimizer_shards", "accelerate.utils.fsdp_utils"),
    "accelerate-gguf-disk": ("accelerate.gguf_disk", "accelerate.utils.modeling"),
    "accelerate-int8-on-cpu": ("accelerate.int8_on_cpu", "accelerate.utils.modeling"),
    "accelerate-offload-buffers": ("accelerate.offload_buffers", "accelerate.hooks"),
    "accelerate-offloaded-state-dict": ("accelerate.offloaded_state_dict", "accelerate.hooks"),
    "accelerate-offloaded-training": ("accelerate.offloaded_training", "accelerate.hooks"),
    "accelerate-parameter-containers": ("accelerate.parameter_containers", "accelerate.hooks"),
    "accelerate-quanto-offload": ("accelerate.quanto_offload", "accelerate.hooks"),
    "accelerate-torchao-save-model": ("accelerate.torchao_save_model", "accelerate.accelerator"),
    "accelerate-torchao-save-state": ("accelerate.torchao_save_state", "accelerate.checkpointing"),
    "accelerate-weight-norm-offload": ("accelerate.weight_norm_offload", "accelerate.hooks"),
    "bnb-4bit-checkpoint-names": ("bitsandbytes.four_bit_checkpoint_names", "bitsandbytes.nn.modules"),
    "bnb-cpu-half-blockwise": ("bitsandbytes.cpu_half_blockwise", "bitsandbytes.functional"),
    "bnb-cpu-packing": ("bitsandbytes.cpu_packing", "bitsandbytes.nn.modules"),
    "bnb-cpu-packing-sharded": ("bitsandbytes.cpu_packing_sharded", "bitsandbytes.nn.modules"),
    "bnb-cpu-zero-block": ("bitsandbytes.cpu_zero_block", "bitsandbytes.cextension"),
    "bnb-current-device": ("bitsandbytes.current_device", "bitsandbytes.functional"),
    "bnb-int8-assign": ("bitsandbytes.int8_assign", "bitsandbytes.nn.modules"),
    "bnb-int8-checkpoint-names": ("bitsandbytes.int8_checkpoint_names", "bitsandbytes.nn.modules"),
    "bnb-int8-input-layout": ("bitsandbytes.int8_input_layout", "bitsandbytes.autograd._functions"),
    "bnb-int8-prequantized": ("bitsandbytes.int8_prequantized", "bitsandbytes.nn.modules"),
    "bnb-int8-reload": ("bitsandbytes.int8_reload", "bitsandbytes.nn.modules"),
    "bnb-int8-requantize": ("bitsandbytes.int8_requantize", "bitsandbytes.nn.modules"),
    "bnb-int8-saved-tiles": ("bitsandbytes.int8_saved_tiles", "bitsandbytes.nn.modules"),
    "bnb-linear4bit-bias": ("bitsandbytes.linear4bit_bias", "bitsandbytes.nn.modules"),
    "bnb-linear4bit-conversion": ("bitsandbytes.linear4bit_conversion", "bitsandbytes.nn.modules"),
    "bnb-linear4bit-reload": ("bitsandbytes.linear4bit_reload", "bitsandbytes.nn.modules"),
    "bnb-linear8bit-move": ("bitsandbytes.linear8bit_move", "bitsandbytes.nn.modules"),
    "bnb-packed-cast": ("bitsandbytes.packed_cast", "bitsandbytes.nn.modules"),
    "bnb-param-kwargs": ("bitsandbytes.param_kwargs", "bitsandbytes.nn.modules"),
    "bnb-params-pickle": ("bitsandbytes.params_pickle", "bitsandbytes.nn.modules"),
    "bnb-params4bit-deepcopy": ("bitsandbytes.params4bit_deepcopy", "bitsandbytes.nn.modules"),
    "bnb-params4bit-shared-state": ("bitsandbytes.params4bit_shared_state", "bitsandbytes.nn.modules"),
    "bnb-quant-state-code": ("bitsandbytes.quant_state_code", "bitsandbytes.functional"),
    "bnb-quant-state-meta": ("bitsandbytes.quant_state_meta", "bitsandbytes.nn.modules"),
    "diffusers-4bit-load-scan": (
        "diffusers.four_bit_load_scan",
        "diffusers.quantizers.bitsandbytes.bnb_quantizer",
    ),
    "diffusers-4bit-storage": ("diffusers.four_bit_storage", "diffusers.models.modeling_utils"),
    "diffusers-8bit-hooks-follow": ("diffusers.eight_bit_hooks_follow", "diffusers.models.modeling_utils"),
    "diffusers-8bit-model-gate": ("diffusers.eight_bit_model_gate", "diffusers.models.modeling_utils"),
    "diffusers-8bit-modular-gate": (
        "diffusers.eight_bit_modular_gate",
        "diffusers.modular_pipelines.modular_pipeline",
    ),
    "diffusers-8bit-move-gate": ("diffusers.eight_bit_move_gate", "diffusers.pipelines.pipeline_utils"),
    "diffusers-8bit-offload-detection": (
        "diffusers.eight_bit_offload_detection",
        "diffusers.pipelines.pipeline_utils",
    ),
    "diffusers-ace-step-tokenizer-weights": (
        "diffusers.ace_step_tokenizer_weights",
        "diffusers.pipelines.ace_step.modeling_ace_step",
    ),
    "diffusers-adapter-dtype": ("diffusers.adapter_dtype", "diffusers.models.modeling_utils"),
    "diffusers-anyflow-embedder-dtype": (
        "diffusers.anyflow_embedder_dtype",
        "diffusers.models.transformers.transformer_anyflow",
    ),
    "diffusers-anyflow-far-embedder-dtype": (
        "diffusers.anyflow_far_embedder_dtype",
        "diffusers.models.transformers.transformer_anyflow_far",
    ),
    "diffusers-balanced-lost-component": (
        "diffusers.balanced_lost_component",
        "diffusers.pipelines.pipeline_loading_utils",
    ),
    "diffusers-balanced-quantized-size": (
        "diffusers.balanced_quantized_size",
        "diffusers.pipelines.pipeline_utils",
    ),
    "diffusers-bria-fibo2-timestep-dtype": (
        "diffusers.bria_fibo2_timestep_dtype",
        "diffusers.models.transformers.transformer_bria_fibo2",
    ),
    "diffusers-cache-disabled-offloaded": ("diffusers.cache_disabled_offloaded", "diffusers.hooks.hooks"),
    "diffusers-cascade-prior-dtype": (
        "diffusers.cascade_prior_dtype",
        "diffusers.pipelines.stable_cascade.pipeline_stable_cascade_prior",
    ),
    "diffusers-control-lora-reset": ("diffusers.control_lora_reset", "diffusers.loaders.lora_pipeline"),
    "diffusers-controlnet-flux-from-quantized": (
        "diffusers.controlnet_flux_from_quantized",
        "diffusers.models.controlnet_flux",
    ),
    "diffusers-controlnet-from-quantized": (
        "diffusers.controlnet_from_quantized",
        "diffusers.models.controlnets",
    ),
    "diffusers-controlnet-hunyuan-from-quantized": (
        "diffusers.controlnet_hunyuan_from_quantized",
        "diffusers.models.controlnet_hunyuan",
    ),
    "diffusers-controlnet-sparse-from-quantized": (
        "diffusers.controlnet_sparse_from_quantized",
        "diffusers.models.controlnet_sparsectrl",
    ),
    "diffusers-controlnet-union-attention": (
        "diffusers.controlnet_union_attention",
        "diffusers.models.controlnets.controlnet_union",
    ),
    "diffusers-cpu-only": ("diffusers.cpu_only", "diffusers.quantizers.bitsandbytes.bnb_quantizer"),
    "diffusers-custom-diffusion-dtype": (
        "diffusers.custom_diffusion_dtype",
        "diffusers.models.attention_processor",
    ),
    "diffusers-dequantize-flags": ("diffusers.dequantize_flags", "diffusers.quantizers.base"),
    "diffusers-dequantize-storage": (
        "diffusers.dequantize_storage",
        "diffusers.quantizers.bitsandbytes.utils",
    ),
    "diffusers-fp32-warning": ("diffusers.fp32_warning", "diffusers.models.modeling_utils"),
    "diffusers-from-pipe-cast": ("diffusers.from_pipe_cast", "diffusers.pipelines.pipeline_utils"),
    "diffusers-fuse-lora-gguf": ("diffusers.fuse_lora_gguf", "diffusers.loaders.peft"),
    "diffusers-fuse-lora-offloaded": ("diffusers.fuse_lora_offloaded", "diffusers.loaders.lora_base"),
    "diffusers-fuse-model-lora-offloaded": ("diffusers.fuse_model_lora_offloaded", "diffusers.loaders.peft"),
    "diffusers-fuse-qkv-quantized": ("diffusers.fuse_qkv_quantized", "diffusers.models.attention"),
    "diffusers-gguf-dequantize": ("diffusers.gguf_dequantize", "diffusers.quantizers.gguf.utils"),
    "diffusers-gguf-kept-modules": (
        "diffusers.gguf_kept_modules",
        "diffusers.quantizers.gguf.gguf_quantizer",
    ),
    "diffusers-gguf-pickle": ("diffusers.gguf_pickle", "diffusers.quantizers.gguf.utils"),
    "diffusers-gguf-plain-parameter": (
        "diffusers.gguf_plain_parameter",
        "diffusers.quantizers.gguf.gguf_quantizer",
    ),
    "diffusers-gguf-sequential": ("diffusers.gguf_sequential", "diffusers.quantizers.gguf.utils"),
    "diffusers-group-offload-bnb": ("diffusers.group_offload_bnb", "diffusers.hooks.group_offloading"),
    "diffusers-group-offload-buffers": (
        "diffusers.group_offload_buffers",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-containers": (
        "diffusers.group_offload_containers",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-disk": ("diffusers.group_offload_disk", "diffusers.hooks.group_offloading"),
    "diffusers-group-offload-disk-device": (
        "diffusers.group_offload_disk_device",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-guard": ("diffusers.group_offload_guard", "diffusers.hooks.group_offloading"),
    "diffusers-group-offload-nested-lists": (
        "diffusers.group_offload_nested_lists",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-quanto": ("diffusers.group_offload_quanto", "diffusers.hooks.group_offloading"),
    "diffusers-group-offload-skipped": (
        "diffusers.group_offload_skipped",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-tied-parameters": (
        "diffusers.group_offload_tied_parameters",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-torchao": (
        "diffusers.group_offload_torchao",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-group-offload-vae-blocks": (
        "diffusers.group_offload_vae_blocks",
        "diffusers.hooks.group_offloading",
    ),
    "diffusers-hunyuan-pooler-weights": ("diffusers.hunyuan_pooler_weights", "diffusers.models.embeddings"),
    "diffusers-image-projection-dtype": ("diffusers.image_projection_dtype", "diffusers.models.embeddings"),
    "diffusers-int8-tiles-dequantized": (
        "diffusers.int8_tiles_dequantized",
        "diffusers.quantizers.bitsandbytes.utils",
    ),
    "diffusers-ip-adapter-quantized": ("diffusers.ip_adapter_quantized", "diffusers.loaders.unet"),
    "diffusers-layerwise-casting-lora": (
        "diffusers.layerwise_casting_lora",
        "diffusers.hooks.layerwise_casting",
    ),
    "diffusers-layerwise-casting-quantized": (
        "diffusers.layerwise_casting_quantized",
        "diffusers.hooks.layerwise_casting",
    ),
    "diffusers-load-model-lora-offloaded": ("diffusers.load_model_lora_offloaded", "diffusers.loaders.peft"),
    "diffusers-lora-device-offloaded": ("diffusers.lora_device_offloaded", "diffusers.loaders.lora_base"),
    "diffusers-lora-offload-flip": ("diffusers.lora_offload_flip", "diffusers.loaders.lora_pipeline"),
    "diffusers-meta-component-device": ("diffusers.meta_component_device", "diffusers.models.modeling_utils"),
    "diffusers-meta-pipeline-device": (
        "diffusers.meta_pipeline_device",
        "diffusers.pipelines.pipeline_utils",
    ),
    "diffusers-motion-linear-input": (
        "diffusers.motion_linear_input",
        "diffusers.models.unets.unet_motion_model",
    ),
    "diffusers-param-device": ("diffusers.param_device", "diffusers.models.modeling_utils"),
    "diffusers-pix2pix-zero-grad": (
        "diffusers.pix2pix_zero_grad",
        "diffusers.pipelines.deprecated.stable_diffusion_variants.pipeline_stable_diffusion_pix2pix_zero",
    ),
    "diffusers-quantized-cast": ("diffusers.quantized_cast", "diffusers.pipelines.pipeline_utils"),
    "diffusers-quantized-modular-cast": (
        "diffusers.quantized_modular_cast",
        "diffusers.modular_pipelines.modular_pipeline",
    ),
    "diffusers-quanto-dequantize": (
        "diffusers.quanto_dequantize",
        "diffusers.quantizers.quanto.quanto_quantizer",
    ),
    "diffusers-quanto-kept-modules": ("diffusers.quanto_kept_modules", "diffusers.models.modeling_utils"),
    "diffusers-quanto-lora": ("diffusers.quanto_lora", "diffusers.loaders.lora_pipeline"),
    "diffusers-quanto-parts": ("diffusers.quanto_parts", "diffusers.quantizers.quanto.quanto_quantizer"),
    "diffusers-quanto-reload": ("diffusers.quanto_reload", "diffusers.quantizers.quanto.quanto_quantizer"),
    "diffusers-quanto-string-map": (
        "diffusers.quanto_string_map",
        "diffusers.quantizers.quanto.quanto_quantizer",
    ),
    "diffusers-quanto-warmup": ("diffusers.quanto_warmup", "diffusers.models.model_loading_utils"),
    "diffusers-save-with-lora": ("diffusers.save_with_lora", "diffusers.models.modeling_utils"),
    "diffusers-sequential-guard": ("diffusers.sequential_guard", "diffusers.pipelines.pipeline_utils"),
    "diffusers-shap-e-quantized-renderer": (
        "diffusers.shap_e_quantized_renderer",
        "diffusers.pipelines.shap_e.renderer",
    ),
    "diffusers-sharded-companions": ("diffusers.sharded_companions", "diffusers.models.modeling_utils"),
    "diffusers-single-file-device": ("diffusers.single_file_device", "diffusers.loaders.single_file_model"),
    "diffusers-single-file-quantize": (
        "diffusers.single_file_quantize",
        "diffusers.loaders.single_file_model",
    ),
    "diffusers-spread-guard": ("diffusers.spread_guard", "diffusers.pipelines.pipeline_utils"),
    "diffusers-text-encoder-lora-quantized": (
        "diffusers.text_encoder_lora_quantized",
        "diffusers.loaders.lora_pipeline",
    ),
    "diffusers-textual-inversion-offload-flip": (
        "diffusers.textual_inversion_offload_flip",
        "diffusers.loaders.textual_inversion",
    ),
    "peft-8bit-dequantize-cpu": ("peft.eight_bit_dequantize_cpu", "peft.utils.integrations"),
    "peft-8bit-empty-adapter": ("peft.eight_bit_empty_adapter", "peft.tuners.tuners_utils"),
    "peft-8bit-empty-lora": ("peft.eight_bit_empty_lora", "peft.tuners.lora.model"),
    "peft-deft-packed-weight": ("peft.deft_packed_weight", "peft.tuners.deft.layer"),
    "peft-dora-4bit-hooked": ("peft.dora_four_bit_hooked", "peft.tuners.lora.dora"),
    "peft-dora-8bit-cpu": ("peft.dora_8bit_cpu", "peft.utils.integrations"),
    "peft-dora-gguf": ("peft.dora_gguf", "peft.utils.integrations"),
    "peft-int8-raw-weight": ("peft.int8_raw_weight", "peft.tuners"),
    "peft-int8-tiles-dequantized": ("peft.int8_tiles_dequantized", "peft.utils.integrations"),
    "peft-loha-packed-weight": ("peft.loha_packed_weight", "peft.tuners.loha.layer"),
    "peft-lokr-packed-weight": ("peft.lokr_packed_weight", "peft.tuners.lokr.layer"),
    "peft-merge-gguf": ("peft.merge_gguf", "peft.tuners.tuners_utils"),
    "peft-merge-lycoris-gguf": ("peft.merge_lycoris_gguf", "peft.tuners.lycoris_utils"),
    "peft-merge-lycoris-quanto": ("peft.merge_lycoris_quanto", "peft.tuners.lycoris_utils"),
    "peft-merge-oft-bnb": ("peft.merge_oft_bnb", "peft.tuners.oft.bnb"),
    "peft-merge-other-adapters": ("peft.merge_other_adapters", "peft.tuners.tuners_utils"),
    "peft-merge-quanto": ("peft.merge_quanto", "peft.tuners.lora.layer"),
    "peft-merge-torchao": ("peft.merge_torchao", "peft.tuners.lora.torchao"),
    "peft-unilora-packed-weight": ("peft.unilora_packed_weight", "peft.tuners.unilora.layer"),
    "peft-unmerge-bnb": ("peft.unmerge_bnb", "peft.tuners.lora.bnb"),
    "peft-unmerge-hira": ("peft.unmerge_hira", "peft.tuners.hira.bnb"),
    "peft-unmerge-oft": ("peft.unmerge_oft", "peft.tuners.oft.bnb"),
    "peft-unmerge-other-adapters": ("peft.unmerge_other_adapters", "peft.tuners"),
    "peft-unmerge-pvera": ("peft.unmerge_pvera", "peft.tuners.pvera.bnb"),
    "peft-unmerge-road": ("peft.unmerge_road", "peft.tuners.road.bnb"),
    "peft-unmerge-torchao": ("peft.unmerge_torchao", "peft.tuners.lora.torchao"),
    "peft-unmerge-vera": ("peft.unmerge_vera", "peft.tuners.vera.bnb"),
    "quanto-awq-strided-input": ("quanto.awq_strided_input", "optimum.quanto.tensor.weights.awq.qbits"),
    "quanto-checkpoint-load": ("quanto.checkpoint_load", "optimum.quanto.nn.qmodule"),
    "quanto-checkpoint-shape": ("quanto.checkpoint_shape", "optimum.quanto.nn.qmodule"),
    "quanto-extension-fallback": ("quanto.extension_fallback", "optimum.quanto.library.extensions.extension"),
    "quanto-extension-lock": ("quanto.extension_lock", "optimum.quanto.library.extensions.extension"),
    "quanto-fp8-plain": ("quanto.fp8_plain", "optimum.quanto.tensor.weights.qbytes"),
    "quanto-freeze-meta": ("quanto.freeze_meta", "optimum.quanto.quantize"),
    "quanto-int4-cpu": ("quanto.int4_cpu", "optimum.quanto.tensor.weights.qbits"),
    "quanto-int8-cpu-kernel": ("quanto.int8_cpu_kernel", "optimum.quanto.library.qbytes_mm"),
    "quanto-load-map": ("quanto.load_map", "optimum.quanto.tensor.weights"),
    "quanto-marlin-bias": ("quanto.marlin_bias", "optimum.quanto.tensor.weights.marlin.fp8.qbits"),
    "quanto-move-beside-graph": ("quanto.move_beside_graph", "optimum.quanto.nn.qlinear"),
    "quanto-offloaded-backward": ("quanto.offloaded_backward", "optimum.quanto.tensor.function"),
    "quanto-strided-input": ("quanto.strided_input", "optimum.quanto.tensor.weights"),
    "quanto-weight-clone": ("quanto.weight_clone", "optimum.quanto.tensor.weights"),
    "quanto-weight-gradient": ("quanto.weight_gradient", "optimum.quanto.tensor.function"),
    "torch-checkpoint-names-cache": (
        "torch.checkpoint_names_cache",
        "torch.distributed.checkpoint.state_dict",
    ),
    "torch-composable-fully-shard-8bit": (
        "torch.composable_fully_shard_eight_bit",
        "torch.distributed._composable.fsdp.fully_shard",
    ),
    "torch-fully-shard-8bit": ("torch.fully_shard_eight_bit", "torch.distributed.fsdp"),
    "torch-sharded-loaded-4bit": ("torch.sharded_loaded_four_bit", "torch.distributed.fsdp"),
    "torchao-load-map": ("torchao.load_map", "torchao.quantization.quant_api"),
    "torchao-load-scan": ("torchao.load_scan", "torchao.prototype.safetensors.safetensors_support"),
    "torchao-module-pickle": ("torchao.module_pickle", "torchao.quantization.quant_api"),
    "transformers-4bit-part-of-checkpoint": (
        "transformers.four_bit_part_of_checkpoint",
        "transformers.quantizers.quantizer_bnb_4bit",
    ),
    "transformers-8bit-cuda": ("transformers.eight_bit_cuda", "transformers.modeling_utils"),
    "transformers-8bit-ignored-companions": (
        "transformers.eight_bit_ignored_companions",
        "transformers.quantizers.quantizer_bnb_8bit",
    ),
    "transformers-dequantize-flags": ("transformers.dequantize_flags", "transformers.quantizers.base"),
    "transformers-dequantize-offloaded": (
        "transformers.dequantize_offloaded",
        "transformers.quantizers.base",
    ),
    "transformers-int8-tiles-dequantized": (
        "transformers.int8_tiles_dequantized",
        "transformers.integrations.bitsandbytes",
    ),
    "transformers-meta-component-device": (
        "transformers.meta_component_device",
        "transformers.modeling_utils",
    ),
    "transformers-quantized-resave": ("transformers.quantized_resave", "transformers.core_model_loading"),
    "transformers-quanto-cast": ("transformers.quanto_cast", "transformers.modeling_utils"),
    "transformers-quanto-dequantize": (
        "transformers.quanto_dequantize",
        "transformers.quantizers.quantizer_quanto",
    ),
    "transformers-sharded-companions": ("transformers.sharded_companions", "transformers.modeling_utils"),
    "transformers-siglip-head-attention": (
        "transformers.siglip_head_attention",
        "transformers.models.siglip.modeling_siglip",
    ),
    "transformers-siglip2-head-attention": (
        "transformers.siglip2_head_attention",
        "transformers.models.siglip2.modeling_siglip2",
    ),
    "transformers-siglip2-patch-dtype": (
        "transformers.siglip2_patch_dtype",
        "transformers.models.siglip2.modeling_siglip2",
    ),
    "transformers-torchao-embeddings": (
        "transformers.torchao_embeddings",
        "transformers.quantizers.quantizer_torchao",
    ),
}

# What a user may choose in the environment variable beside the ids; each fix declares its own.
OPTIONS: tuple[str, ...] = ("quanto:build", "quanto:marlin", "quanto:no-build")

# The distributions whose versions decide, in the order in which people think of them.
DISTRIBUTIONS = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "optimum-quanto",
    "gguf",
    "torchao",
    "peft",
    "wrapt",
    "packaging",
)
