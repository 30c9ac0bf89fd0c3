"""Tiny quantized models for the verify cases, saved to and loaded from disk."""
