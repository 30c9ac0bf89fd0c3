"""Runs at every start of the interpreter of an environment where diffusers_quantfix is installed.

The wheel puts it next to the package, as the package ``diffusers_quantfix_startup``, not into it: importing
diffusers_quantfix activates it, and a dependency in a requirements file must not change a program unexpectedly.  It is
a folder because uv leaves the bytecode of a removed module behind.  ``diffusers_quantfix_startup.pth`` (Python <= 3.14)
or ``diffusers_quantfix_startup.start`` (PEP 829) calls `run`, which does nothing unless activation is enabled: by
``DIFFUSERS_QUANTFIX_AUTO=1``, or once per environment by ``python -m diffusers_quantfix enable``.  The path file itself
checks whether it is enabled, so that otherwise not even this module is loaded: loading it would take longer than
everything else.  Its line is compiled at every start, twice in a virtual environment, so it is short.

When enabled, it only installs a finder that waits for the first of the libraries, as the package itself does when it is
imported: most processes of an environment never import one, and this way one module less is loaded.  `site` is still
running at this point, perhaps twice in a virtual environment: only builtins are imported, and only inside functions.
Modules that a finder references through the globals of its methods outlive the other modules at the end of the
interpreter and are cleared one by one; with ``os`` and ``sys`` that took as long as everything else.  Errors here never
stop the interpreter from starting.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "DIFFUSERS_QUANTFIX_AUTO"
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")
# Installed with the wheel, so that uninstalling removes this file too.
CHOICE = __file__.rpartition("__init__")[0] + "choice"

# Every library with a patched module; a test compares it with the fixes.
LIBRARIES = frozenset(
    ("accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "torchao", "transformers")
)
# And the patched modules of torch
OF_TORCH = frozenset(
    (
        "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
    )
)

_ran = False


def chosen() -> str:
    """How activation was enabled: "variable", "enable", or "" when it was not."""
    import os

    word = os.environ.get(VARIABLE, "").strip().lower()
    if word:
        return "variable" if word in ON else ""
    try:
        with open(CHOICE, "rb") as file:  # whatever the file holds, no start may print a traceback
            return "enable" if file.read(8).strip() == b"on" else ""
    except OSError:
        return ""


def misunderstood() -> str:
    """A sentence with the variable's value when it is neither on nor off; else empty."""
    import os

    word = os.environ.get(VARIABLE, "").strip()
    if not word or word.lower() in ON or word.lower() in OFF:
        return ""
    return f"{VARIABLE}={word} is neither {', '.join(ON)} nor {', '.join(OFF)}: diffusers_quantfix is not activated"


def run() -> None:
    """Import the package before the first library, if that is enabled."""
    global _ran
    if _ran:
        return
    if not chosen():
        _report_misunderstood()
        return
    _ran = True
    import os
    import sys

    imported = not LIBRARIES.isdisjoint(sys.modules) or not OF_TORCH.isdisjoint(sys.modules)
    if os.environ.get("DIFFUSERS_QUANTFIX") or imported:
        wake()  # settings are read at once, so that a typo in them is reported; and libraries may be imported already
    else:
        sys.meta_path.insert(0, FirstLibrary())


def _report_misunderstood() -> None:
    """Report once, on standard error, that the variable's value is not valid."""
    global _ran
    sentence = misunderstood()
    if sentence:
        import sys

        _ran = True
        if sys.stderr is not None:
            sys.stderr.write(f"diffusers_quantfix: {sentence}\n")


def wake() -> None:
    """Import the package and activate it: its own finder would come too late for the running search."""
    try:
        from diffusers_quantfix import wake
    except ImportError:
        return  # the package was deleted by hand and this file remained: print nothing, at every start
    wake()


class FirstLibrary:
    """A finder that finds nothing itself.  When one of the libraries is imported, it imports the package first."""

    woken = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if (name in LIBRARIES or name in OF_TORCH) and not self.woken:
            # It stays at its position: the running search counts the finders, and would skip one.
            self.woken = True
            wake()
            if name in OF_TORCH:  # this search is past the place of the watcher
                try:
                    from diffusers_quantfix.first_library import watched_spec
                except ImportError:
                    return None
                return watched_spec(name, path, target)
        return None
