"""Fixes for bugs in peft."""
