"""What the tools do to devices, they do to devices that take time (`tests.rig.late`)."""

from __future__ import annotations

import pytest

# They look at every object of the process again and again: three times as long behind all other tests.
FIRST = ("test_hostile_objects", "test_release", "test_revert_offloaded", "test_track")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith("tests/tools/"):
            item.add_marker(pytest.mark.late(needs="diffusers>=0.42"))
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/tools/{name}" for name in FIRST)))
