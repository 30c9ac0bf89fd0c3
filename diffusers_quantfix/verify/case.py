"""The exceptions that a case may raise.

A case that may end its process (a segmentation fault) sets ``MAY_CRASH = True`` in its module. It runs after the other
cases, which would otherwise need a new process that imports the libraries again.
"""

from __future__ import annotations


class CannotReproduce(Exception):
    """This machine cannot reproduce the bug; the text is the reason."""


class NeedsDevice(CannotReproduce):
    """The bug needs more CUDA devices than this machine has; the text is the reason ("needs two CUDA devices")."""
