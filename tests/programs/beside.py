"""A program that uses this package beside another tool that patches, before it or after it.

Arguments: the tool, "before" or "after", the folder of a Flux transformer, and "PACKAGE" to import this package.
"""
# imports the package itself

import copy
import hashlib
import json
import sys
import threading

TOOL, ORDER, FOLDER = sys.argv[1:4]


def pasted_whole():
    """A method from an issue thread that does not call the one that it replaces."""
    import bitsandbytes as bnb
    import torch

    def to(self, *args, **kwargs):
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != "meta" and not self.bnb_quantized:
            return self._quantize(device)
        if self.quant_state is not None:
            self.quant_state.to(device)
        return bnb.nn.Params4bit(
            torch.nn.Parameter.to(self, device=device, dtype=dtype, non_blocking=non_blocking),
            requires_grad=self.requires_grad, quant_state=self.quant_state, blocksize=self.blocksize,
            compress_statistics=self.compress_statistics, quant_type=self.quant_type,
            quant_storage=self.quant_storage, bnb_quantized=self.bnb_quantized, module=self.module,
        )  # fmt: skip

    bnb.nn.Params4bit.to = to
    return to


def pasted_around():
    """A method from an issue thread that calls the one that it replaces."""
    import bitsandbytes as bnb

    original = bnb.nn.Params4bit.to

    def to(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    bnb.nn.Params4bit.to = to
    return to


def gevent():
    from gevent import monkey

    monkey.patch_all()


def ddtrace():
    import ddtrace.auto  # noqa: F401


def opentelemetry():
    from opentelemetry.instrumentation.auto_instrumentation import initialize

    initialize()


def libraries():
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401


def unsloth():
    import unsloth  # noqa: F401


def nothing():
    pass


def use(tool):
    return tool()


theirs = use(globals()[TOOL]) if ORDER == "before" else None
if "PACKAGE" in sys.argv:
    import diffusers_quantfix  # noqa: F401

if ORDER == "after":
    if TOOL.startswith("pasted"):
        import diffusers  # noqa: F401
    theirs = use(globals()[TOOL])

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel  # noqa: E402

from tests.rig import models  # noqa: E402


def picture(model):
    latents = models.call_flux(models.flux_pipeline(model), device="cpu", dtype=torch.bfloat16)
    return hashlib.sha256(latents.float().numpy().tobytes()).hexdigest()


told = {}
for bits in (4, 8):
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = FluxTransformer2DModel.from_pretrained(
        FOLDER, quantization_config=config, torch_dtype=torch.bfloat16
    )
    told[f"{bits} bits"] = picture(model)
    model.save_pretrained(f"saved{bits}")
    told[f"{bits} bits, reloaded"] = picture(
        FluxTransformer2DModel.from_pretrained(f"saved{bits}", torch_dtype=torch.bfloat16)
    )
    told[f"{bits} bits, copied"] = picture(copy.deepcopy(model))
thread = threading.Thread(target=lambda: told.update({"in a thread": picture(model)}))
thread.start()
thread.join()

package = sys.modules.get("diffusers_quantfix")
board = {said.id: said for said in package.status()} if package else {}
odd = {
    key: said.reason for key, said in board.items() if said.state in ("failed", "overwritten", "candidate")
}
by_others = [
    key for key, said in board.items() if said.state == "healthy" and "was replaced by" in said.reason
]
reverted = {said.id: said.state for said in package.revert()} if package else {}
print()  # some tools leave a line unfinished
print("RESULT", json.dumps({
    "told": told,
    "was applied": [key for key, said in board.items() if said.state == "applied"],
    "odd": odd,
    "healthy by others": by_others,
    "still applied": [key for key, state in reverted.items() if state == "applied"],
    "cannot be undone": [key for key, state in reverted.items() if state == "overwritten"],
    "theirs": theirs is None or vars(bnb.nn.Params4bit)["to"] is theirs,
}))  # fmt: skip
