"""Quantized checkpoints whose files end within a layer."""

from __future__ import annotations

import json
from pathlib import Path

SHOWS = r"does not contain `bitsandbytes__\*`|Missing quantization component `SCB`|absmax|quant_map"
SIZE = 4100  # bytes: the ends of such files fall everywhere


def save(model, folder: Path, bits: int, **options) -> Path:
    """Save a model in files of ``SIZE``, some of which end between a weight and its companions."""
    model.save_pretrained(folder, max_shard_size=SIZE, **options)
    index = next(folder.glob("*.index.json"))
    places = json.loads(index.read_text())["weight_map"]
    last = ".absmax" if bits == 4 else ".SCB"
    parted = [
        key
        for key, file in places.items()
        if key.endswith(last) and places[key.replace(".SCB", ".weight").removesuffix(".absmax")] != file
    ]
    assert parted, "no file ends between a weight and its companions"
    return folder
