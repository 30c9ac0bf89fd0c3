"""Runs at every start of the interpreter of an environment where diffusers_quantfix is installed.

The wheel puts it next to the package, as the package ``diffusers_quantfix_startup``, not into it: importing
diffusers_quantfix activates it, and a dependency in a requirements file may not change a program by surprise.  It is
a folder because uv leaves the bytecode of a removed module behind.  ``diffusers_quantfix_startup.pth`` (Python <= 3.14)
or ``diffusers_quantfix_startup.start`` (PEP 829) calls `run`, which does nothing until activation was chosen: by
``DIFFUSERS_QUANTFIX_AUTO=1``, or once per environment by ``python -m diffusers_quantfix enable``.  The path file looks
for a choice itself, so that without one not even this module is loaded: that would take longer than all the rest.  Its
line is compiled at every start, twice in a virtual environment, so it is short.

Even then it leaves no more than a finder that waits for the first of the libraries, as the package itself does when
it is imported: most processes of an environment never import one, and here one module less is loaded.  `site` is still
at work when this runs, perhaps twice in a virtual environment: no import but of builtins, and those within functions.
What a finder leads to, through the globals of its methods, outlives the other modules at the end of the interpreter
and is cleared one by one; with ``os`` and ``sys`` that took as long as all the rest.  Whatever goes wrong, the
interpreter starts.
"""

VARIABLE = "DIFFUSERS_QUANTFIX_AUTO"
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")
# Installed with the wheel, so that its removal removes the choice with it.
CHOICE = __file__.rpartition("__init__")[0] + "choice"

# Whatever has a module that is patched; a test holds it against the fixes.
LIBRARIES = frozenset(("accelerate", "bitsandbytes", "diffusers", "optimum", "peft", "transformers"))

_ran = False


def chosen() -> str:
    """By what activation was chosen: "variable", "enable", or "" when it was not."""
    import os

    word = os.environ.get(VARIABLE, "").strip().lower()
    if word:
        return "variable" if word in ON else ""
    try:
        with open(CHOICE) as file:
            return "enable" if file.read().strip() == "on" else ""
    except OSError:
        return ""


def misunderstood() -> str:
    """What the variable holds when it is neither a yes nor a no, as a sentence; else empty."""
    import os

    word = os.environ.get(VARIABLE, "").strip()
    if not word or word.lower() in ON or word.lower() in OFF:
        return ""
    return f"{VARIABLE}={word} is neither {', '.join(ON)} nor {', '.join(OFF)}: diffusers_quantfix is not activated"


def run() -> None:
    """See to it that the package is there before the first library is, if that was chosen."""
    global _ran
    if _ran:
        return
    if not chosen():
        _report_misunderstood()
        return
    _ran = True
    import os
    import sys

    if os.environ.get("DIFFUSERS_QUANTFIX") or not LIBRARIES.isdisjoint(sys.modules):
        wake()  # settings are read at once, so that a typo in them is reported; and libraries may be there already
    else:
        sys.meta_path.insert(0, FirstLibrary())


def _report_misunderstood() -> None:
    """Say once, on standard error, that the variable holds a word that means nothing here."""
    global _ran
    sentence = misunderstood()
    if sentence:
        import sys

        _ran = True
        if sys.stderr is not None:
            sys.stderr.write(f"diffusers_quantfix: {sentence}\n")


def wake() -> None:
    """Import the package and activate it: its own wait would begin behind the search that is under way."""
    try:
        from diffusers_quantfix import wake
    except ImportError:
        return  # the package was removed by hand and this file was left: say nothing, at every start
    wake()


class FirstLibrary:
    """A finder that finds nothing.  When one of the libraries is asked for, it imports the package first."""

    woken = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in LIBRARIES and not self.woken:
            # It stays in its place: the search that is under way counts the finders, and would leave one out.
            self.woken = True
            wake()
