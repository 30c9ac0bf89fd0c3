"""What a case may say."""

from __future__ import annotations


class CannotShow(Exception):
    """This machine cannot show the defect; the text is the sentence why ("needs two CUDA devices")."""
