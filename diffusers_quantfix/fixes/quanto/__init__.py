"""Fixes of optimum-quanto."""
