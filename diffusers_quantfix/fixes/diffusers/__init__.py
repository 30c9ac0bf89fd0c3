"""Fixes for defects of diffusers."""
