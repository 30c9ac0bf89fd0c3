"""For PyInstaller: what a frozen program needs so that the same fixes work as without freezing.

Fixes are imported by name, some recompile a library's function from its source, and library versions are read from
metadata. Fixes import the libraries that they patch, but no library is added to a program that does not import it.
"""

# mypy: ignore-errors
from importlib.metadata import PackageNotFoundError

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

# Other packages that this package imports, inside functions.
excludedimports = [
    "accelerate", "bitsandbytes", "diffusers", "gguf", "matplotlib", "optimum", "peft", "safetensors", "tokenizers",
    "tomli", "torch", "torchao", "tqdm", "transformers",
]  # fmt: skip


def _is_needed(name):
    # `verify` starts a Python interpreter, which a frozen program does not have. The commands need a command line.
    return not name.startswith(("diffusers_quantfix.verify", "diffusers_quantfix.__main__"))


hiddenimports = collect_submodules("diffusers_quantfix", filter=_is_needed)
datas = collect_data_files("diffusers_quantfix", includes=["**/*.json"])
for _name in (
    "accelerate", "bitsandbytes", "diffusers", "gguf", "optimum-quanto", "packaging", "peft", "torch", "torchao",
    "transformers", "wrapt",
):  # fmt: skip
    try:
        datas += copy_metadata(_name)
    except PackageNotFoundError:
        continue

module_collection_mode = dict.fromkeys(
    ("accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "torchao", "transformers"), "pyz+py"
)
