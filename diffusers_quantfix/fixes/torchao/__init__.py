"""Fixes of torchao."""
