"""LoRA adapters on quantized layers: placing new ones, merging them."""
