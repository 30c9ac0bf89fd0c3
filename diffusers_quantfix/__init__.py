"""Mends known defects of diffusers with quantized models, in the pinned releases that have them.

``import diffusers_quantfix`` is enough, before or after the libraries.  A fix is installed only where the release
is claimed and the defect is really there; `status` says for every fix what became of it and why.

    import diffusers_quantfix as qf

    print(qf.status())      # the board; .to_dict() for machines
    qf.revert()             # take everything back
    qf.apply()              # and install it again

Importing this package loads nothing but itself while none of the libraries is imported.
"""

from .activation import activate, apply, revert, status

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "revert", "status"]

activate()
