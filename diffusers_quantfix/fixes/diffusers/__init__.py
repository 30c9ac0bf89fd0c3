"""Fixes for bugs in diffusers."""
