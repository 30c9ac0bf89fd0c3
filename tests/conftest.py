"""The plugins of this test suite; `tests.sides` says what a test of a fix proves."""

pytest_plugins = ["tests.sides", "tests.part", "tests.chosen_cases", "tests.rig.fixtures"]
