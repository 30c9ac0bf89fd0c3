"""Fixes for defects of transformers."""
