"""Fixes for bugs in transformers."""
