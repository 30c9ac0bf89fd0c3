"""Fixes of torch: where it keeps, or cannot take, a quantized model."""
