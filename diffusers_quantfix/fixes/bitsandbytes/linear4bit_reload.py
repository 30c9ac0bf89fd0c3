"""A 4-bit layer cannot load its own state dict.

Symptom: RuntimeError "Error(s) in loading state_dict ... Unexpected key(s) in state_dict: "weight.absmax",
    "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"" from ``load_state_dict`` with the layer's own state
    dict; ``Accelerator.load_state`` cannot resume a QLoRA run. With ``strict=False`` the bytes of the checkpoint are
    combined with the scales of the layer. With ``assign=True`` the weight becomes a plain Parameter, which is no longer
    quantized or dequantized.
Cause: ``Linear4bit`` saves the quant state next to the weight, but has no ``_load_from_state_dict`` that reads it.
Upstream: not reported.
Patch: the quant state of the checkpoint is loaded with the weight, into the existing tensors if they have the same
    shape. With ``assign=True`` the weight becomes a Params4bit again. If the layer is on ``meta`` or not quantized yet,
    and so cannot load it, upstream's error remains.
"""

from __future__ import annotations

from types import ModuleType

from ...engine.draft import Draft
from ...engine.fix import Fix
from ...engine.probe import resolve
from ...weights import params_4bit

FIX = Fix(
    __doc__,
    id="bnb-linear4bit-reload",
    module="bitsandbytes.nn.modules",
    claims={"bitsandbytes": ">=0.43.0,<=0.50.2"},
    patterns=(r"Unexpected key\(s\) in state_dict: .{0,200}(absmax|quant_map|quant_state)",),
    frames=("load_state_dict", "4.?bit|bitsandbytes__nf4"),
)

# What bitsandbytes saves next to a weight.
_PACKED = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def broken(modules: ModuleType) -> bool:
    """Load a quantized layer of 64 weights from its own state."""
    import torch

    layer_class = resolve(modules, "Linear4bit")
    # Without __init__, which needs a completely imported bitsandbytes.
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    layer.weight, state = params_4bit.tiny_parameter(modules)
    layer.quant_state = state
    saved = {
        "weight": layer.weight.data,
        **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()},
    }
    unexpected: list[str] = []
    layer._load_from_state_dict(saved, "", {}, True, [], unexpected, [])
    return bool(unexpected)


def patch(modules: ModuleType, draft: Draft) -> None:
    import torch

    params4bit, quant_state = resolve(modules, "Params4bit"), resolve(modules, "QuantState")

    def make(original):
        def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        ):
            weight = self._parameters.get("weight")
            assign = local_metadata.get("assign_to_params_buffers", False)
            given = state_dict.get(f"{prefix}weight")
            of_state = {}
            if isinstance(weight, params4bit) and isinstance(given, torch.Tensor) and not given.is_meta:
                of_state = state_in(state_dict, f"{prefix}weight.")
            fits = bool(of_state) and (assign or can_take(weight, given, prefix, error_msgs))
            problems = len(error_msgs)
            rest = state_dict
            if fits:
                rest = {key: value for key, value in state_dict.items() if key not in of_state}
            original(self, rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
            if len(error_msgs) > problems:
                return
            if assign and isinstance(weight, params4bit):
                assigned(self, weight)
            if fits:
                load(self, {key[len(prefix) + len("weight.") :]: value for key, value in of_state.items()})

        return _load_from_state_dict

    def state_in(state_dict, prefix):
        """The entries of a quant state, if there is one, with their keys in the state dict."""
        if not any(prefix + name in state_dict for name in _PACKED):
            return {}
        return {
            prefix + name: state_dict[prefix + name]
            for name in _PACKED + _TENSORS
            if prefix + name in state_dict
        }

    def can_take(weight, given, prefix, error_msgs):
        """Whether the bytes ``given`` can be copied into ``weight``; otherwise upstream reports why not."""
        if weight.quant_state is None or weight.is_meta:
            return False
        unpack(weight)
        if given.shape == weight.shape and given.dtype != weight.dtype:
            # torch would convert the packed bytes as if they were numbers.
            error_msgs.append(
                f"{prefix}weight is packed as {given.dtype} in the state dict, and as {weight.dtype} in the layer."
            )
            return False
        return True

    def unpack(weight):
        """Undo the repacking for the CPU kernel, as ``_save_to_state_dict`` does."""
        params_4bit.unpack(weight)
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            weight.data, weight.quant_state = modules._convert_weight_packed_for_cpu_inverse(
                weight.data, weight.quant_state
            )

    def assigned(layer, before):
        """Turn what torch assigned into a Params4bit like ``before``."""
        weight = layer._parameters["weight"]
        if isinstance(weight, params4bit) or weight is None:
            state = vars(weight).get("quant_state") if isinstance(weight, params4bit) else None
            if weight is not before and state is not None and layer.quant_state is not None:
                layer.quant_state = state
            return
        new = torch.Tensor._make_subclass(type(before), weight.data, before.requires_grad)
        vars(new).update(vars(before))
        new.module = layer
        if weight.shape == (layer.out_features, layer.in_features) and weight.is_floating_point():
            # Not quantized yet: its first move quantizes it.
            new.quant_state, new.bnb_quantized, layer.quant_state = None, False, None
        layer._parameters["weight"] = new

    def load(layer, saved):
        """Load the quant state ``saved`` into a layer whose weight is already loaded."""
        weight = layer.weight
        new = quant_state.from_dict(saved, device=weight.device)
        state = weight.quant_state
        if state is None or state.absmax.is_meta or not alike(state, new):
            state = new
        else:
            pairs = [(state, new)] + ([(state.state2, new.state2)] if new.nested else [])
            for mine, other in pairs:
                mine.absmax.copy_(other.absmax)
                if not torch.equal(mine.code, other.code):  # layers share it
                    mine.code = other.code
            state.offset, state.dtype = new.offset, new.dtype
        weight.quant_state = state
        # A weight that does not know its layer could not pass it the next quant state.
        if layer.quant_state is not None or vars(weight).get("module") is layer:
            layer.quant_state = state
        weight.bnb_quantized = True
        weight.blocksize, weight.quant_type = state.blocksize, state.quant_type
        weight.compress_statistics, weight.quant_storage = state.nested, weight.dtype

    def alike(one, other):
        def facts(state):
            nested = state.state2
            return (
                state.quant_type,
                state.blocksize,
                state.shape,
                *((part.absmax.shape, part.absmax.dtype, part.absmax.device, part.blocksize, part.code.shape)
                  for part in (state, nested) if part is not None),
            )  # fmt: skip

        return facts(one) == facts(other)

    draft.wrap_plain(resolve(modules, "Linear4bit"), "_load_from_state_dict", make)
