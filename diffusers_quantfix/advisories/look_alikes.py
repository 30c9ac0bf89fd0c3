"""Errors that look like a known bug but are not: what they are, and what to try."""

from __future__ import annotations

import re

# (pattern, sentence that says what it is and what to try).
LOOK_ALIKES: tuple[tuple[str, str], ...] = (
    (
        r"driver on your system is too old|driver version is insufficient",
        "the NVIDIA driver is older than torch needs, so torch sees no GPU: update the driver, or install a torch that "
        "is built for an older CUDA",
    ),
    (
        # diffusers/quantizers/torchao/torchao_quantizer.py logs before it has a logger
        r"torchao_quantizer\.py.{0,400}name 'logger' is not defined|"
        r"Failed to import diffusers\..{0,400}name 'logger' is not defined",
        "diffusers 0.33 to 0.36 cannot be imported beside torchao 0.16 or newer: `pip install -U diffusers`, or `pip "
        "install 'torchao<0.16'`, or `pip uninstall torchao` if nothing else needs it",
    ),
    (
        r"pool INTERNAL ASSERT FAILED .{0,200}Invalid thread pool",
        "torch's thread pool breaks where several threads of a forked process start to compute at once, if "
        "torch.set_num_threads() was called before the fork: call it again in the child before its threads start, or "
        "set OMP_NUM_THREADS instead, or start the process with 'spawn'",
    ),
    (
        r"(train|fine-?tune) a model that has been loaded in [48]-bit precision on "
        r"(a different device|multiple devices)",
        "a model can only be trained on the one GPU that it was loaded on: pass device_map={'': "
        "torch.cuda.current_device()} to from_pretrained()",
    ),
    (
        r"Cannot merge LORA layers when the model is loaded in",
        "PEFT before 0.5 cannot merge into quantized weights: `pip install -U peft`",
    ),
    (
        r"HeaderTooLarge|header too large|InvalidHeaderDeserialization|MetadataIncompleteBuffer|"
        r"Error while deserializing header",
        "a safetensors file is damaged or not one: a Git LFS pointer, an incomplete download or a pickle file; "
        "download it again",
    ),
    (
        r"invalid value encountered in cast",
        "the picture has NaN: often the VAE overflows in float16; run it in float32 or bfloat16 "
        "(pipe.vae.to(torch.float32)), or use a VAE that is made for float16",
    ),
    (
        r"memory.efficient.attention|xformers is |with `?xformers|enable_xformers",
        "this comes from xformers, which diffusers no longer needs: remove "
        "enable_xformers_memory_efficient_attention(), torch's own attention is as fast",
    ),
    (
        r"Error no file named|does not appear to have a file named",
        "the folder or repository has no such file: check the path, and whether the checkpoint needs variant='fp16'",
    ),
    (
        r"requires accelerate v?[\d.]+|requires Accelerate|enable_model_cpu_offload requires accelerator",
        "accelerate is missing, too old, or installed for another interpreter, or torch sees no GPU: `python -m "
        "diffusers_quantfix doctor` says which",
    ),
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator: (can't|not enough)",
        "the memory is full. That is a bug only where weights stay that should be gone: `qf.track(pipe)` shows "
        "what stays, `qf.release(pipe)` frees it; else use enable_model_cpu_offload(), group offloading or 4-bit "
        "weights",
    ),
    (
        r"(self|mat1|m1) and (mat2|m2) must have the same dtype, but got \w+ and (Byte|Char)\b",
        "code that does not call a quantized layer uses its packed weight, as torch.nn.MultiheadAttention does: leave "
        "that layer unquantized (llm_int8_skip_modules of a BitsAndBytesConfig, modules_to_not_convert of others)",
    ),
    (
        r"mat1 and mat2 must have the same dtype|expected scalar type|expected m1 and m2 to have the same dtype|"
        r"must have the same dtype|"
        r"Input type \(\S+\) and (weight|bias) type \(\S+\) should be the same",
        "an input and a weight differ in dtype or device: load all components with the same torch_dtype, and pass "
        "inputs in that dtype on that device",
    ),
    (
        r"tensors to be on the same device|tensors need to be on the same GPU",
        "an input or a component is on another device than the weights that use it: let the pipeline move them, and "
        "call what is offloaded through its own forward(). If the model is quantized or offloaded, several bugs end in "
        "this message: pass the whole traceback",
    ),
    (
        r"of floating point( and complex)? dtype can require gradients",
        "quantized weights are integers, which have no gradients: code wraps one in torch.nn.Parameter or trains it; "
        "pass requires_grad=False, or train an adapter",
    ),
    (
        r"shapes cannot be multiplied|size mismatch for|must match the size of tensor|"
        r"has an expected quantized shape of|expected shape tensor\(",
        "the shapes do not fit: a checkpoint, LoRA or input is made for another model",
    ),
    (
        r"Target modules .{1,400} not found in the base model|state_dict'? should be empty at this point",
        "this LoRA names layers that the model does not have, or has a format that this diffusers cannot convert: "
        "look for one that is made for this model",
    ),
    (
        # https://github.com/huggingface/diffusers/issues/9514, 9108 and 9270; mended by optimum-quanto 0.2.5
        r"KeyError: '[\w.]*\.weight\._(data|scale|shift)[\w.]*'",
        "optimum-quanto before 0.2.5 cannot load a state dict that lacks its own weights, as a LoRA's does: "
        "`pip install -U optimum-quanto`",
    ),
    (
        r"is not supported for '?[48]-bit'? quantized models with the installed version of bitsandbytes",
        "this bitsandbytes is too old to move quantized models: `pip install -U bitsandbytes`",
    ),
    (
        r"not implemented for 'Float8_|couldn't find storage object Float8_",
        "float8 only stores weights: load the model in bfloat16, then use enable_layerwise_casting() or a "
        "quantization_config",
    ),
    (
        r"Unknown quantization type, got|create_quantized_param\(\) got an unexpected keyword",
        "this diffusers does not know that quantizer, or files of two releases lie in one folder: "
        "`python -m diffusers_quantfix doctor`, then install diffusers anew",
    ),
    (
        r"no kernel image is available|not compatible with the current PyTorch installation",
        "torch is built for other GPUs than this one: install a build for its compute capability",
    ),
    (
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available",
        "torch sees no NVIDIA GPU: `python -m diffusers_quantfix doctor` says why",
    ),
    (
        r"CUDA Setup failed|libbitsandbytes_(cuda|cpu|rocm)|has no native library|bitsandbytes library load error|"
        r"compiled without GPU support|are not supported under CPU",
        "the native library of bitsandbytes is missing or does not fit this torch: `python -m bitsandbytes` says which "
        "one it looks for",
    ),
    (
        r"No module named|cannot import name|DLL load failed|undefined symbol",
        "a library is missing or does not fit another: `python -m diffusers_quantfix doctor` names releases that do "
        "not fit together",
    ),
    (
        r"device-side assert|illegal memory access|CUBLAS_STATUS",
        "a CUDA kernel failed, and the traceback may show a later line: run once more with CUDA_LAUNCH_BLOCKING=1",
    ),
    (
        r"GatedRepoError|RepositoryNotFoundError|LocalEntryNotFoundError|40[134] Client Error|"
        r"not a valid model identifier",
        "the checkpoint could not be downloaded: check its name, your token and the network",
    ),
    (
        r"Some weights of the model checkpoint .{0,200}were not used|newly initialized|weights? .{0,60}missing",
        "the checkpoint and the class do not belong together, or a file is missing: compare the names of the weights",
    ),
    (
        r"\bmlx[-_ ]|\bmflux\b|llama\.cpp|\bvllm\b|\bsglang\b|exllama|koboldcpp",
        "this program has weights and code of its own, which none of the fixes concerns: ask its authors",
    ),
    (
        r"No GPU found\. A GPU is needed for quantization",
        "this transformers quantizes with bitsandbytes on a GPU only: `python -m diffusers_quantfix doctor` says why "
        "torch sees none",
    ),
    (
        r"Some modules are dispatched on the CPU or the disk",
        "the model does not fit the GPU: use 4 bits, a smaller model, or a device_map of your own",
    ),
    (
        r"Ninja is required to load C\+\+ extensions|CUDA_HOME environment variable is not set|"
        r"Error building extension",
        "a CUDA extension is compiled when it is first used: `pip install ninja`, and a CUDA toolkit of "
        "torch's version",
    ),
)

# Words of this field; a general message without any of them belongs to something else.
FIELD = re.compile(
    r"diffusers|bitsandbytes|\bbnb|quant|gguf|torchao|offload|\b(do|lo)ras?\b|\blo(kr|ha)\b|peft|accelerate/|optimum/|core_model_loading|\bu?mt5|\bt5|\bQ(Linear|Tensor)|"
    r"tensor and device combinations|"
    r"[48].?bit|nf4|int8|fp8|float8|_lora|pipe(line)?\b|Params4bit|Linear8bit|absmax|device_map|fsdp|fully_shard",
    re.IGNORECASE,
)

# Programs with loaders, trainers and weights of their own, which run none of the code of the fixes.
OWN_LOADERS = r"KSampler|ComfyUI[-_](GGUF|bitsandbytes)|comfy/|\bin Forge\b|ERROR lora diffusion_model"
OWN_TRAINERS = r"sd-scripts|kohya|_train_network\.py|FluxTrainer|InitFluxLoRATraining"

# Messages that many programs raise: (pattern, what the text must contain, what it must not).
_NEEDS: tuple[tuple[str, str, str], ...] = (
    (r"Ninja is required|CUDA_HOME environment", r"quanto|qint[24]", ""),
    (r"functools\.partial", r"torchao|quanti", ""),
    (
        r"invalid python storage",
        r"torchao|save_model|save_state|group.?offload",
        r"torch/(fx|_subclasses)/|\bTPU\b|torch_xla",
    ),
    (r"Some modules are dispatched", r"diffusers|balanced", ""),
    (r"illegal memory access", r"group.?offload", OWN_LOADERS),
    (r"No GPU found", "", r"transformers/(quantizers|modeling_utils)|driver on your system is too old"),
    (
        r"of floating point",
        r"Pix2Pix|fsdp|fully_shard|fuse_(qkv_)?projections|FluxLora|load_lora_weights|_param_shape_or_error",
        "",
    ),
    (
        r"Torch not compiled|no NVIDIA driver|No CUDA GPUs",
        r"set_module_tensor_to_device|bitsandbytes/|_for_expanded_lora",
        "",
    ),
    (
        r"size of tensor a",
        r"gguf|bitsandbytes/|Linear8bitLt|tuners/",
        rf"{OWN_LOADERS}|While copying the parameter",
    ),
    (r"expanded size of the tensor|input tensors need to be on the same GPU", "", OWN_LOADERS),
    (r"meta tensor", rf"\A(?!.*\bFile ').|{FIELD.pattern}", OWN_TRAINERS),
    (r"activated sequential model offloading", r"\bFile '|[48].?bit|quantiz|bnb|bitsandbytes", ""),
    (
        r"KeyError: None|recursion depth|cannot pickle|list\.remove",
        r"\A(?!.*File ').|gguf|peft/|bitsandbytes|quantizer",
        "",
    ),
)


def look_alike(message: str) -> str:
    """What an error message that looks like a known bug's really is; empty if unknown."""
    return next(
        (sentence for pattern, sentence in LOOK_ALIKES if re.search(pattern, message, re.IGNORECASE)), ""
    )


def stands_alone(message: str, text: str) -> bool:
    """Whether a matched message is enough: a general one needs its library in the text."""
    return all(
        re.search(needed, text, re.IGNORECASE) and not (refused and re.search(refused, text, re.IGNORECASE))
        for pattern, needed, refused in _NEEDS
        if re.search(pattern, message, re.IGNORECASE)
    )
