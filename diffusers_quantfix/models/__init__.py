"""Whole quantized models and pipelines: moving, casting, dequantizing."""
