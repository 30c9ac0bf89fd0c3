"""LoRA and other peft adapters on quantized layers: placing new layers, merging and unmerging."""
