"""Tiny models, quantized, saved to and loaded from disk: what the verify cases run on."""
