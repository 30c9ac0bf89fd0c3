"""Fixes of peft."""
