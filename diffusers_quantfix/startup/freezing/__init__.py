"""Where PyInstaller finds the hook of this package, which the entry point ``pyinstaller40`` names.

Next to the start-up file, not in the package: importing the package would activate it in PyInstaller's own process.
"""

import os


def folders() -> "list[str]":
    """The folders with hooks."""
    return [os.path.dirname(__file__)]
