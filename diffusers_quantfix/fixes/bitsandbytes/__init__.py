"""Fixes for bugs in bitsandbytes."""
