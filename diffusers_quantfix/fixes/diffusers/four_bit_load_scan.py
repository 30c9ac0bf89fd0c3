"""Loading a 4-bit checkpoint reads all of its keys once per layer.

Symptom: ``from_pretrained`` of a 4-bit checkpoint is slow: the load time is quadratic in the number of layers.
Cause: ``BnB4BitDiffusersQuantizer.create_quantized_param`` searches the whole state dict for each parameter, to find
    the few keys that begin with its name, and searches the list of unexpected keys twice for each of these.
Upstream: not reported.
Patch: it receives only those keys, and no list. They are found in a sorted list of the keys, created once per shard.
    The list of unexpected keys is sorted too; its order has no meaning (since 0.33 it is created from a set).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.locks import Lock
from ...engine.probe import resolve

FIX = Fix(
    __doc__,
    id="diffusers-4bit-load-scan",
    module="diffusers.quantizers.bitsandbytes.bnb_quantizer",
    claims={"diffusers": ">=0.31.0,<=0.42.1", "bitsandbytes": ""},
    harm="memory or time",
    asked_once=True,
)

# Among the arguments: model, value, name, device, state dict, unexpected keys.
_NAME, _STATE_DICT, _UNEXPECTED = 2, 4, 5


def broken(bnb_quantizer: ModuleType) -> bool:
    """Whether the state dict is searched at all; a stand-in would need a working bitsandbytes."""
    create = resolve(bnb_quantizer, "BnB4BitDiffusersQuantizer.create_quantized_param")
    return {"items", "startswith"} <= set(create.__code__.co_names)


def patch(bnb_quantizer: ModuleType, draft: Draft) -> None:
    import threading
    from bisect import bisect_left

    # The sorted keys of the shard being loaded. Not on the quantizer, which the model keeps; no tensors.
    last = threading.local()

    # Threads that load a model's shards in parallel share its list of unexpected keys.
    lock = Lock()

    def make(original):
        def create_quantized_param(self, *args, **kwargs):
            name = kwargs["param_name"] if "param_name" in kwargs else args[_NAME]
            whole = kwargs["state_dict"] if "state_dict" in kwargs else args[_STATE_DICT]
            if not self.pre_quantized or not whole:
                return original(self, *args, **kwargs)
            few = {key: whole[key] for key in keys_below(whole, f"{name}.")}
            unexpected = kwargs.get("unexpected_keys", args[_UNEXPECTED] if len(args) > _UNEXPECTED else None)
            args, kwargs = changed(args, kwargs, _STATE_DICT, "state_dict", few)
            args, kwargs = changed(args, kwargs, _UNEXPECTED, "unexpected_keys", None)
            result = original(self, *args, **kwargs)
            if unexpected and few:
                with lock.held:
                    take_out(unexpected, few, f"{name}.")
            return result

        return create_quantized_param

    def keys_below(state_dict, prefix):
        mark = (id(state_dict), len(state_dict), next(iter(state_dict)), next(reversed(state_dict)))
        if getattr(last, "mark", None) != mark:
            last.mark, last.keys = mark, sorted(state_dict)
        return last.keys[between(last.keys, prefix)]

    def take_out(unexpected, keys, prefix):
        if not keys.keys() <= set(unexpected[between(unexpected, prefix)]):
            unexpected.sort()  # it is not sorted yet, or is incomplete
        span = between(unexpected, prefix)
        unexpected[span] = [key for key in unexpected[span] if key not in keys]

    def between(ordered, prefix):
        start = bisect_left(ordered, prefix)
        return slice(start, bisect_left(ordered, prefix[:-1] + chr(ord(prefix[-1]) + 1), start))

    draft.wrap_plain(resolve(bnb_quantizer, "BnB4BitDiffusersQuantizer"), "create_quantized_param", make)


def changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with one of them replaced, if it was passed at all."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    return (*args[:position], value, *args[position + 1 :]) if len(args) > position else args, kwargs
