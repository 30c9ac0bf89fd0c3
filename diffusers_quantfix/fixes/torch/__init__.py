"""Fixes for bugs in torch: where it keeps a quantized model in memory, or cannot handle one."""
