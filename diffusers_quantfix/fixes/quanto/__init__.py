"""Fixes for bugs in optimum-quanto."""
