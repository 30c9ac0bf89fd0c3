"""Where every tensor of a model lives, companions included.

`audit` is the question, `Audit` the answer. The rest is shared with `diffusers_quantfix.memory`: `components` knows
what a pipeline is, `tensors` walks all that a component holds, `hooks` knows the offload hooks.
"""

from __future__ import annotations

from .auditing import Audit, Misplaced, MisplacedError, TensorRecord, audit

__all__ = ["Audit", "Misplaced", "MisplacedError", "TensorRecord", "audit"]
