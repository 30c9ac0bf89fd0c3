"""Fixes for defects of accelerate."""
