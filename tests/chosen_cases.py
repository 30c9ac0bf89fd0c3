"""Which cases run with the README's test command: of a test with four and more about a third, the rest is long.

Where paths are given, as for a release set or while something is written, all of them run.
"""

from __future__ import annotations

import pytest

from diffusers_quantfix.fixes.targets import TARGETS

FOLDERS = tuple(f"tests/{name}/" for name in ("engine", "fixes", "imports", "startup", "sweep", "tools"))
FEW = 3
ELSEWHERE = ("long", "whole")
# The README's first command, ``verify --rig``, runs the same cases; the other test only what they say without a device.
VERIFIED = "tests/fixes/test_verify_cases.py::test_on_a_device"
SAID = "tests/fixes/test_verify_cases.py::test_without_a_device"


def is_chosen(number: int) -> bool:
    """Of each three cases one, the first of all included; another place each time, so that the last parameter's values
    take turns."""
    return (number + number // 3) % 3 == 0


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Here all cases of a test are together; later only those that are to run, after ``--last-failed`` one."""
    found = yield
    if collector.config.args != collector.config.getini("testpaths") or not isinstance(found, list):
        return found
    cases = [case for case in found if not any(map(case.get_closest_marker, ELSEWHERE))]
    for number, case in enumerate(cases if len(cases) > FEW else ()):
        if not case.nodeid.startswith(FOLDERS):
            break
        values = case.callspec.params.values() if not case.nodeid.startswith(SAID) else ()
        is_only = any(value in TARGETS for value in values if isinstance(value, str))
        if case.nodeid.startswith(VERIFIED) or not (is_only or is_chosen(number)):
            case.add_marker(pytest.mark.long)
    return found
