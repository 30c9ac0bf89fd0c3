"""What the tools do to devices, they do to devices that take time (`tests.rig.late`)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith("tests/tools/"):
            item.add_marker(pytest.mark.late(needs="diffusers>=0.42"))
