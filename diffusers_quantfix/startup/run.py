# Runs at every start of the interpreter of an environment where diffusers_quantfix is installed. The wheel puts it next
# to the package, as `diffusers_quantfix_startup`, not into it: importing diffusers_quantfix activates it, and a
# dependency in a requirements file must not change a program unexpectedly.  It is a folder because uv leaves the
# bytecode of a removed module behind.  `diffusers_quantfix_startup.pth` (Python <= 3.14) imports it, which calls `run`;
# `diffusers_quantfix_startup.start` (PEP 829) calls `run` by name.  The line in the .pth file is compiled at every
# start, twice in a virtual environment: it only checks that this folder still exists, so that nothing is printed at
# start-up after somebody has deleted it. Every start pays for each line of this file, so it contains only what every
# start needs, with comments in place of docstrings and annotations; the rest is in `enabled.py`.  `site` is still
# running at this point, perhaps twice in a virtual environment, and modules in a finder's globals outlive the others at
# interpreter shutdown and are cleared one by one: so only builtins are used, imported within functions.
#
# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,arg-type,comparison-overlap"


# The libraries with a patched module, and the patched modules of torch; a test compares them with the fixes.  One
# string, because ten take longer to load; `found` does the exact comparison.
NAMES = (
    "accelerate bitsandbytes diffusers optimum peft torchao transformers torch.distributed._composable.fsdp.fully_shard"
    " torch.distributed.checkpoint.state_dict torch.distributed.fsdp"
)


def find_spec(name, path=None, target=None):
    # A finder that finds nothing itself: when one of the names is about to be imported, it imports the package.
    if name in NAMES:
        try:
            import sys

            # Damaged after `run()`: imported again, it would add a finder to the running search each time.
            if __name__ not in sys.modules:
                return None
            from .enabled import found
        except Exception:  # deleted by hand while the process ran, or damaged by an interrupted upgrade
            return None
        return found(name, path, target)
    return None


def run():
    # Waits for the first library if activation is enabled: by DIFFUSERS_QUANTFIX_AUTO=1, or once per environment by
    # `python -m diffusers_quantfix enable`, which writes into the file `choice`.  That file is installed with the
    # wheel, so that uninstalling removes it too.  Other values of either, and libraries that are already imported, are
    # handled in `enabled`; each of the libraries imports typing.
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
        pass  # never print a traceback at start-up, whatever was deleted by hand or damaged


run()
