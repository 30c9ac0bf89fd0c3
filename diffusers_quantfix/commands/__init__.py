"""The commands of ``python -m diffusers_quantfix``, one file each.

A command module has ``add_arguments(parser)``, ``run(options) -> int``, which returns the exit code, and `EXIT_CODES`,
the text about the exit codes in ``--help``.
"""
