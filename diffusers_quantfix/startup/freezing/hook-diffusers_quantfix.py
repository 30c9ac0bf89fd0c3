"""For PyInstaller: what a frozen program needs to have the fixes that it has when it is not frozen.

They are imported by name, some compile a function of a library again from its source, and the version of a library is
in its metadata. They import the libraries that they patch, but a program is given none that it does not import itself.
"""

# mypy: ignore-errors
from importlib.metadata import PackageNotFoundError

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

# What this package imports, in functions, of others.
excludedimports = [
    "accelerate", "bitsandbytes", "diffusers", "gguf", "matplotlib", "optimum", "peft", "safetensors", "tokenizers",
    "tomli", "torch", "torchao", "tqdm", "transformers",
]  # fmt: skip


def _is_needed(name):
    # `verify` starts Python; a frozen program has none. The commands need a command line.
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
