"""The device of every tensor of a model, companions included.

`audit` returns an `Audit` (in `report`), `checks` decides what is misplaced. The rest is shared with
`diffusers_quantfix.memory`: `components` lists the components of a pipeline, `tensors` the tensors of a component, and
`hooks` what offload hooks keep.
"""

from __future__ import annotations

from .auditing import audit
from .report import Audit, Misplaced, MisplacedError, TensorRecord

__all__ = ["Audit", "Misplaced", "MisplacedError", "TensorRecord", "audit"]
