"""The fixes, one file each, and the list by which the watcher knows them.

The list repeats two facts of the declarations, so that a start of the interpreter reads one file instead of all;
a test holds the two against each other.
"""

from __future__ import annotations

# id -> (file below this package, target module)
INDEX: dict[str, tuple[str, str]] = {}

# The distributions whose versions decide, in the order in which people think of them.
DISTRIBUTIONS = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "optimum-quanto",
    "gguf",
    "torchao",
    "peft",
    "wrapt",
    "packaging",
)
