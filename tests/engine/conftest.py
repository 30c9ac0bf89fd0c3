from __future__ import annotations

from pathlib import Path

import pytest

from .harness import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An empty world: no library, no fix."""
    return World(tmp_path)


@pytest.fixture
def simple(world: World) -> World:
    """The library ``lib`` 1.0 with a broken ``lib.core.f``, and the fix ``fix-f`` that claims ``lib<2``."""
    world.library()
    world.fix()
    return world
