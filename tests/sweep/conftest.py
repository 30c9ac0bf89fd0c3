"""Which of a sweep's combinations run with the README's test command: each with one backend of `OFTEN`, in turn.

Placements on a stream run with devices that take time (`tests.rig.late`).
"""

from __future__ import annotations

import zlib

import pytest

from tests.sweep.backends import OFTEN

BACKEND = ("backend", "kind")  # the parameter's name


@pytest.hookimpl(tryfirst=True)  # before the markers are asked for
def pytest_collection_modifyitems(items):
    for item in items:
        if not item.nodeid.startswith("tests/sweep/") or not hasattr(item, "callspec"):
            continue
        parameters = dict(item.callspec.params)
        if any("stream" in str(value) for value in parameters.values()):
            item.add_marker(pytest.mark.late(needs="diffusers>=0.42"))
        backend = next((parameters.pop(name) for name in BACKEND if name in parameters), None)
        if backend not in OFTEN or not parameters:
            continue
        # By the values alone, not by what else was collected: a test that failed is chosen again when it runs alone.
        turn = zlib.crc32(" ".join(map(str, (item.nodeid.partition("[")[0], *parameters.values()))).encode())
        if OFTEN[turn % len(OFTEN)] != backend:
            item.add_marker(pytest.mark.long)
