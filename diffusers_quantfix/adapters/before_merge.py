"""What a layer of peft and its base layer were before an adapter was merged or taken out; shared by the backends.

torch is not imported here at module level.

Upstream: ``merge`` and ``unmerge`` of peft's layers (peft/tuners/lora/layer.py, peft/tuners/lora/bnb.py).
"""

from __future__ import annotations

import contextlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["KEPT", "undone_on_failure"]

# The attribute of a layer of peft with its weight from before the first merge: in a tuple, as torch registers a bare
# Parameter as one of the layer, and a class of ours would have to be there to unpickle it.
KEPT = "_quantfix_before_merge"


@contextlib.contextmanager
def undone_on_failure(adapter: Any, base: Any) -> Iterator[None]:
    """If the block raises, weight, bias and state of ``base``, and what counts as merged, are what they were before.

    Args:
        adapter: a layer of peft.
        base: the layer below it, which has a ``weight``.
    """
    weight, bias = base.weight, base.bias
    merged = list(adapter.merged_adapters)
    bias_before = None if bias is None else bias.data.clone()
    # peft marks the old weight itself as not quantized, clears the state of an 8-bit layer and forgets norms of DoRA.
    owners = (weight, base, getattr(base, "state", None))
    held = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
    held += [cache for cache in (getattr(adapter, "_caches", None),) if isinstance(cache, dict)]
    before = [dict(one) for one in held]
    try:
        yield
    except BaseException:
        base.weight = weight
        if bias is not None:
            bias.data = bias_before
            base.bias = bias
        for one, values in zip(held, before, strict=True):
            one.clear()
            one.update(values)
        adapter.merged_adapters[:] = merged
        raise
