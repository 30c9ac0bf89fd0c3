"""Quantization backend x placement x LoRA x dtype, against the model that was never moved."""
