"""Where every tensor of a model is, companions included.

`audit` returns an `Audit` (in `report`), `checks` decides what is misplaced. The rest is shared with
`diffusers_quantfix.memory`: `components` knows what a pipeline is, `tensors` walks all that a component holds, `hooks`
knows the offload hooks.
"""

from __future__ import annotations

from .auditing import audit
from .report import Audit, Misplaced, MisplacedError, TensorRecord

__all__ = ["Audit", "Misplaced", "MisplacedError", "TensorRecord", "audit"]
