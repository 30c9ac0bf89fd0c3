"""The exceptions that a case may raise.

A case that may end its process (a segmentation fault) says ``MAY_CRASH = True`` in its module. It runs after the
others: they would need a new process, which imports the libraries once more.
"""

from __future__ import annotations


class CannotReproduce(Exception):
    """This machine cannot reproduce the defect; the text is the reason."""


class NeedsDevice(CannotReproduce):
    """It can with more CUDA devices than there are; the text is the reason ("needs two CUDA devices")."""
