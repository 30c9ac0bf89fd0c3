"""Whole programs as their users write them, without this package and with it, and beside tools that patch too.

    python -m pytest -m long tests/programs

Each program is a file here that prints ``RESULT`` and JSON at its end.  The harness writes two copies of it: one whose
first line imports the package, and one without that line.  Where there is no GPU both get the fake CUDA devices of
`tests.rig` if they ask for them with ``# needs: devices``.

Some need what the test extra does not install: nbclient and ipykernel, ddtrace, opentelemetry-distro, gevent, unsloth.
Their tests are skipped with the reason, unless an interpreter that has them is named:

    uv venv other
    uv pip install -p other/bin/python ".[stack,backends]" nbclient ipykernel ddtrace opentelemetry-distro gevent
    DIFFUSERS_QUANTFIX_PROGRAMS_PYTHON=other/bin/python python -m pytest -m long tests/programs
"""
