"""The exception that a case may raise."""

from __future__ import annotations


class CannotReproduce(Exception):
    """This machine cannot reproduce the defect; the text is the reason ("needs two CUDA devices")."""
