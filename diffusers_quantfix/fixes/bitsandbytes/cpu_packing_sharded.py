"""A 4-bit layer sharded by FSDP computes noise from its second run on, on CPUs with AVX512-BF16.

Symptom: after ``fully_shard`` the second run of a 4-bit model in eval mode gives a different output, without an error;
    if training never called ``train()``, its loss differs from the second step on. Training after an evaluation is just
    as wrong, or raises "a view of a leaf Variable that requires grad". With a floating ``quant_storage`` bitsandbytes
    0.49 raises "Only support uint8 qweight".
Cause: FSDP gathers the bytes of a weight for each run, as a plain parameter, and frees them after it.
    ``fix_4bit_weight_quant_state_from_module`` gives that parameter the quant state kept by its layer.
    ``Linear4bit.forward`` then repacks both for a CPU kernel: the gathered bytes, which are lost, and the quant state
    of the layer, which stays. From then on, bytes that are not repacked are read as if they were.
Upstream: none.
Patch: a layer whose weight has lost its quant state is no longer repacked: ``fix_4bit_weight_quant_state_from_module``,
    which recovers the state, also clears the layer's flag that ``Linear4bit.forward`` checks. Repacking for each run,
    as the bytes come and go, would cost more than the kernel saves. One statement is replaced, which adds no call to a
    run.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...engine.source import exchanged, own_function
from ...weights import params_4bit

FIX = Fix(
    __doc__,
    id="bnb-cpu-packing-sharded",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.49.0,<=0.50.2"},
    harm="wrong result",
    hot=True,
)

_RECOVER = "fix_4bit_weight_quant_state_from_module"
_FLAG = "support_avx512bf16_for_cpu"


def broken(modules: ModuleType) -> bool:
    """Recover the state of a layer that may repack; may it still?  Other CPUs never repack."""
    import torch

    recover = resolve(modules, _RECOVER)
    if _FLAG not in resolve(modules, "Linear4bit.forward").__code__.co_names:
        return False
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    layer.quant_storage, layer.quant_state = torch.uint8, params_4bit.tiny_parameter(modules)[1]
    setattr(layer, _FLAG, resolve(modules, "has_avx512bf16")())
    recover(layer)
    return bool(getattr(layer, _FLAG))


def patch(modules: ModuleType, draft: Draft) -> None:
    """Replace the code of the function that recovers the state."""
    function = own_function(modules, _RECOVER)
    old = "module.weight.quant_state = module.quant_state"
    draft.replace(function, "__code__", exchanged(function, old, f"{old}\nmodule.{_FLAG} = False"))
