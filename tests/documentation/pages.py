"""The programs of a page of documentation: its Python blocks, in order, in sizes that tiny models run in seconds."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Library -> the folder of its documentation, and the pages that are about quantization, memory, speed, caches, LoRA and
# devices.
PAGES = {
    "diffusers": (
        "docs/source/en",
        (
            "quantization/overview",
            "quantization/bitsandbytes",
            "quantization/gguf",
            "quantization/quanto",
            "quantization/torchao",
            "optimization/memory",
            "optimization/fp16",
            "optimization/cache",
            "optimization/attention_backends",
            "optimization/speed-memory-optims",
            "tutorials/using_peft_for_inference",
            "training/distributed_inference",
            "using-diffusers/batched_inference",
            "using-diffusers/text-img2vid",
            "using-diffusers/automodel",
            "using-diffusers/loading",
            "modular_diffusers/quickstart",
            "modular_diffusers/modular_pipeline",
            "modular_diffusers/components_manager",
        ),
    ),
    "peft": ("docs/source", ("developer_guides/quantization",)),
    "transformers": (
        "docs/source/en",
        ("quantization/bitsandbytes", "quantization/quanto", "quantization/torchao", "gguf"),
    ),
}
_BLOCK = re.compile(r"^```(?:py|python)\n(.*?)^```", re.S | re.M)
# Sizes of the documentation's programs -> sizes for tiny models on a CPU.
_SMALLER = (
    (r"num_frames=81\b", "num_frames=9, height=64, width=64"),  # Wan's, whose default is 480 x 832
    (r"pipeline\(prompt\)", "pipeline(prompt, height=64, width=64, num_inference_steps=4)"),
    (r"(num_inference_steps\w*\s*=\s*)\d+", r"\g<1>4"),
    (r"(\"num_inference_steps\":\s*)\d+", r"\g<1>4"),
    (r"((?:height|width)\"?\s*[=:]\s*)\d{3,4}", r"\g<1>64"),
    (r"(num_frames\s*=\s*)\d+", r"\g<1>9"),
    (r"(lora_steps = )\d+", r"\g<1>2"),
    (r"\]\s*\*\s*32\b", "] * 2"),
    # Without a network, diffusers wants the name of the file.
    (r"(steamboat-willie-14b\", )", r"\g<1>weight_name='steamboat-willie-14b.safetensors', "),
    (r"(?i)(max_new_tokens\s*=\s*)\d{2,4}", r"\g<1>4"),
    (r"(max_sequence_length\"?\s*[=:]\s*)\d{2,3}", r"\g<1>16"),
)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        number: counted from 1 on its page.
        digest: of its text as it stands on the page.
        text: what is run.
    """

    number: int
    digest: str
    text: str


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page's Markdown."""
    found = []
    for number, match in enumerate(_BLOCK.finditer(page), 1):
        text = match[1]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        for pattern, smaller in _SMALLER:
            text = re.sub(pattern, smaller, text)
        found.append(Block(number, digest, text))
    return found


def read(repository: Path, revision: str, library: str, page: str) -> str | None:
    """A page's Markdown at a revision of a git repository of a library; None if it has no such page."""
    folder, _ = PAGES[library]
    done = subprocess.run(
        ["git", "-C", str(repository), "show", f"{revision}:{folder}/{page}.md"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None
