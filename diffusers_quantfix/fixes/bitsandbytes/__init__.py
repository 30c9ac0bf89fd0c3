"""Fixes for defects of bitsandbytes."""
