"""The commands of ``python -m diffusers_quantfix``, one file each.

A command module has ``add_arguments(parser)`` and ``run(options) -> int``, the exit code.
"""
