"""Whole programs as their users write them, without this package and with it, and beside tools that patch too.

    python -m tests.programs [arguments of pytest]     # all, in an environment that it builds and keeps
    python -m pytest -m long tests/programs            # what runs with the modules that are installed

Each program is a file here that prints ``RESULT`` and JSON at its end.  The harness writes two copies of it: one whose
first line imports the package, and one without that line.  Where there is no GPU both get the fake CUDA devices of
`tests.rig` if they ask for them with ``# needs: devices``.

Some need what the test extra does not install: nbclient and ipykernel, ddtrace, opentelemetry-distro, gevent, unsloth.
The first command installs these beside the newest release set, in the folder of `tests.upstream.environments`; with
the second their tests are skipped with the reason where they are missing, and run where they are not.  The programs
run on the interpreter that ``DIFFUSERS_QUANTFIX_PROGRAMS_PYTHON`` names, or else on that of pytest.
"""
