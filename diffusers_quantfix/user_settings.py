"""The user's settings, read from the current environment."""

import os

from .engine.settings import VARIABLE, Settings
from .fixes import NAMES, OPTIONS

_settings = Settings(os.environ.get(VARIABLE, ""), NAMES, OPTIONS)


def settings() -> Settings:
    """The settings in ``DIFFUSERS_QUANTFIX``; read again whenever the variable has changed."""
    global _settings
    text = os.environ.get(VARIABLE, "")
    if text != _settings.text:
        _settings = Settings(text, NAMES, OPTIONS)
    return _settings
