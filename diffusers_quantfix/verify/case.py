"""What a case may say."""

from __future__ import annotations


class CannotReproduce(Exception):
    """This machine cannot reproduce the defect; the text is the sentence why ("needs two CUDA devices")."""
