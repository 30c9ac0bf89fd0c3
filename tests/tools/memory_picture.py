"""Draws the picture of tests/benchmarks: what ``pipe.to("cpu")`` of an 8-bit pipeline frees, without us and with us.

    python -m tests.tools.memory_picture memory.png

Both sides run in processes of their own, on a real GPU if there is one and on the rig's fake device otherwise: a Flux
pipeline with an 8-bit transformer of random weights, two denoising steps, then the move. Needs the extra ``plot``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

SIDES = {"off": "without diffusers_quantfix", "strict": "with diffusers_quantfix"}


def main(arguments: list[str] | None = None) -> None:
    """Draw the picture; with ``--side`` (used internally) run one side and print its samples as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", nargs="?", default="memory.png", help="the picture to write")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        with redirect_stdout(sys.stderr):  # libraries may print
            result = measure()
        print(json.dumps(result))
        return

    from diffusers_quantfix.memory import Sample
    from diffusers_quantfix.memory.plot import plot

    runs, versions = {}, ""
    for side, title in SIDES.items():
        result = _run(side)
        versions = result["versions"]
        runs[title] = [Sample(**sample) for sample in result["samples"]]
        print(
            f"{title}: {result['samples'][-1]['allocated'][result['device']]:,} bytes on {result['device']} at the end"
        )
    plot(
        runs,
        options.path,
        title=f'An 8-bit Flux pipeline: a run, then pipe.to("cpu")   [{versions}]',
        devices=[result["device"]],
    )
    print(f"wrote {options.path}")


def measure() -> dict:
    """Run this side: device, versions and samples."""
    from importlib.metadata import version

    from tests import rig

    rig.load()
    import diffusers_quantfix as qf

    with ExitStack() as stack:
        import torch

        if not torch.cuda.is_available():
            stack.enter_context(rig.devices())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pipeline = _pipeline(folder)
        with qf.track(pipeline, interval=0) as memory:
            _prompt(pipeline)
            pipeline.to("cpu")
            memory.mark('pipe.to("cpu")')
        versions = ", ".join(f"{name} {version(name)}" for name in ("diffusers", "bitsandbytes"))
        return {"device": "cuda:0", "versions": versions, "samples": memory.to_dict()["samples"]}


def _pipeline(folder: str):
    import torch
    from diffusers import FluxTransformer2DModel

    from tests.rig import models

    whole = models.flux_transformer(
        num_layers=3,
        num_single_layers=6,
        attention_head_dim=64,
        num_attention_heads=8,
        axes_dims_rope=(16, 24, 24),
    )
    transformer = models.load_quantized(FluxTransformer2DModel, models.saved(whole, folder), bits=8)
    pipeline = models.flux_pipeline(transformer, text=True, vae=None)
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
        encoder.to("cuda:0", torch.float16)
    return pipeline


def _prompt(pipeline) -> None:
    # A batch: activations should be seen beside the weights, as they are with models of a real size.
    pipeline(
        ["w1 w2 w3"] * 2,
        max_sequence_length=64,
        height=384,
        width=384,
        num_inference_steps=2,
        output_type="latent",
    )


def _run(side: str) -> dict:
    environment = {**os.environ, "DIFFUSERS_QUANTFIX": side, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--side", side],
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the side {SIDES[side]!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
