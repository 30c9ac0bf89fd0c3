"""The exceptions that a case may raise."""

from __future__ import annotations


class CannotReproduce(Exception):
    """This machine cannot reproduce the defect; the text is the reason."""


class NeedsDevice(CannotReproduce):
    """It can with more CUDA devices than there are; the text is the reason ("needs two CUDA devices")."""
