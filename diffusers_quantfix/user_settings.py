"""The user's settings, read from the current environment."""

import os

from .engine.settings import VARIABLE, Settings
from .fixes import INDEX, OPTIONS

_settings = Settings(os.environ.get(VARIABLE, ""), INDEX, OPTIONS)


def settings() -> Settings:
    """The settings in ``DIFFUSERS_QUANTFIX``; read again whenever the variable has changed."""
    global _settings
    text = os.environ.get(VARIABLE, "")
    if text != _settings.text:
        _settings = Settings(text, INDEX, OPTIONS)
    return _settings
