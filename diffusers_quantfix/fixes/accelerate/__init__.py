"""Fixes for bugs in accelerate."""
