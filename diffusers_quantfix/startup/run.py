# Runs at every start of the interpreter of an environment where diffusers_quantfix is installed.
#
# The wheel puts it next to the package, as the package `diffusers_quantfix_startup`, not into it: importing
# diffusers_quantfix activates it, and a dependency in a requirements file must not change a program unexpectedly.  It
# is a folder because uv leaves the bytecode of a removed module behind.  `diffusers_quantfix_startup.pth` (Python <=
# 3.14) imports it, which calls `run`; `diffusers_quantfix_startup.start` (PEP 829) calls `run` by name.  The line of
# the path file is compiled at every start, twice in a virtual environment: it only asks whether this folder is there
# still, so that a start is quiet after somebody deleted it.
#
# Every start pays for each line of this file, so it holds what every start needs, and comments where elsewhere
# docstrings and annotations are: `enabled.py` has the rest.  `site` is still running at this point, perhaps twice in a
# virtual environment, and what the globals of a finder name outlives the other modules at the end of the interpreter
# and is cleared one by one: so builtins only, imported within functions.
#
# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,arg-type,comparison-overlap"


# The libraries with a patched module, and the patched modules of torch; a test compares them with the fixes.  As one
# string, because Python takes longer to read ten: `found` asks exactly.
NAMES = (
    "accelerate bitsandbytes diffusers optimum peft torchao transformers torch.distributed._composable.fsdp.fully_shard"
    " torch.distributed.checkpoint.state_dict torch.distributed.fsdp"
)


def find_spec(name, path=None, target=None):
    # A finder that finds nothing itself: when one of the names is imported, it imports the package first.
    if name in NAMES:
        try:
            from .enabled import found
        except Exception:  # deleted by hand while the process ran, or damaged by an interrupted upgrade
            return None
        return found(name, path, target)
    return None


def run():
    # Waits for the first library if activation is enabled: by DIFFUSERS_QUANTFIX_AUTO=1, or once per environment by
    # `python -m diffusers_quantfix enable`, which writes into the file `choice`.  That is installed with the wheel, so
    # that uninstalling removes it too.  What else either of them holds is looked at in `enabled`, and so are libraries
    # that are there already: each of them imports typing.
    from os import environ, stat

    try:
        word = environ.get("DIFFUSERS_QUANTFIX_AUTO")
        if word or stat(__file__.rpartition("__init__")[0] + "choice").st_size:
            import sys

            if word not in ("1", None) or "typing" in sys.modules:
                from .enabled import start

                start()
            elif find_spec not in sys.meta_path:
                find_spec.find_spec = (
                    find_spec  # a function as a finder: other code may copy or pickle the list
                )
                sys.meta_path.insert(0, find_spec)
    except Exception:
        pass  # no start may print a traceback, whatever was deleted by hand or damaged


run()
