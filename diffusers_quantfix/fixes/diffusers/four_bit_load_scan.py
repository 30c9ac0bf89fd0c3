"""Loading a 4-bit checkpoint looks at every key of it once per layer.

Symptom: the time that ``from_pretrained`` of a checkpoint in 4 bits takes grows with the square of its layers.
Cause: ``BnB4BitDiffusersQuantizer.create_quantized_param`` goes through the whole state dict for each parameter, to
    find the few keys that begin with its name.
Upstream: not reported.
Cure: it is given those keys only. They are found in a sorted list of the keys, which is made once per shard.
"""

from __future__ import annotations

from ...engine.fix import Fix
from ...engine.probe import resolve

FIX = Fix(
    id="diffusers-4bit-load-scan",
    title="loading a 4-bit checkpoint looks at every key once per layer",
    module="diffusers.quantizers.bitsandbytes.bnb_quantizer",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ""},
    upstream=(),
    symptom="from_pretrained of a 4-bit checkpoint: the load time is quadratic in the number of layers",
)

_AT = 4  # of the state dict among the arguments: model, value, name, device, state dict


def broken(bnb_quantizer) -> bool:
    """Whether the state dict is gone through at all; a stand-in would need a bitsandbytes that works here."""
    create = resolve(bnb_quantizer, "BnB4BitDiffusersQuantizer.create_quantized_param")
    if create.__code__.co_filename == __file__:
        return False
    return {"items", "startswith"} <= set(create.__code__.co_names)


def mend(bnb_quantizer, ledger) -> None:
    import threading
    from bisect import bisect_left

    # The sorted keys of the shard that is being loaded. Not on the quantizer, which the model keeps; no tensors.
    last = threading.local()

    def make(original):
        def create_quantized_param(self, *args, **kwargs):
            name = kwargs["param_name"] if "param_name" in kwargs else args[2]
            whole = kwargs["state_dict"] if "state_dict" in kwargs else args[_AT]
            if not self.pre_quantized or not whole:
                return original(self, *args, **kwargs)
            few = {key: whole[key] for key in keys_below(whole, f"{name}.")}
            if "state_dict" in kwargs:
                kwargs["state_dict"] = few
            else:
                args = (*args[:_AT], few, *args[_AT + 1 :])
            return original(self, *args, **kwargs)

        return create_quantized_param

    def keys_below(state_dict, prefix):
        mark = (id(state_dict), len(state_dict), next(iter(state_dict)), next(reversed(state_dict)))
        if getattr(last, "mark", None) != mark:
            last.mark, last.keys = mark, sorted(state_dict)
        start = bisect_left(last.keys, prefix)
        end = bisect_left(last.keys, prefix[:-1] + chr(ord(prefix[-1]) + 1), start)
        return last.keys[start:end]

    ledger.around(resolve(bnb_quantizer, "BnB4BitDiffusersQuantizer"), "create_quantized_param", make)
