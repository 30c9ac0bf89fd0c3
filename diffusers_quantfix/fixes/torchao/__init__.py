"""Fixes for bugs in torchao."""
