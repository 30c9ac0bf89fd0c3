"""What the user wants, read from the environment variable ``DIFFUSERS_QUANTFIX``.

Imports nothing at module level, because it may be loaded at interpreter start.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VARIABLE = "DIFFUSERS_QUANTFIX"
WORDS = ("off", "strict", "debug", "newer", "claimed", "hint")


class Settings:
    """The parsed words of the variable.

    Args:
        text: the value of the variable.
        known: id of a fix, or name of a target -> the names of the targets that it stands for.
        options: the options of fixes.

    Attributes:
        text: the value of the variable.
        off: install nothing, watch nothing.
        strict: raise where the package would otherwise leave the library unchanged.
        debug: print every decision on standard error.
        hint: after an uncaught error, name a known bug that caused it and is not patched.
        claimed: apply a fix only where its claim fits, not in a newer release with the same code.
        newer: what may be applied above its claimed range, as the user named it; True for everything.
        only: if not empty, what may be installed, as the user named it.
        skip: what may not be installed, as the user named it.
        options: the chosen options of fixes, each as ``<library>:<option>``.
        problems: one sentence for every invalid word.
    """

    __slots__ = (
        "_meant",
        "claimed",
        "debug",
        "hint",
        "newer",
        "off",
        "only",
        "options",
        "problems",
        "skip",
        "strict",
        "text",
    )

    def __init__(
        self, text: str, known: "Mapping[str, tuple[str, ...]]", options: "Iterable[str]" = ()
    ) -> None:
        options = sorted(options)
        chosen: list[str] = []
        only: list[str] = []
        skip: list[str] = []
        newer: list[str] = []
        problems: list[str] = []
        flags = dict.fromkeys(WORDS, False)
        lists = {"only": only, "skip": skip, "newer": newer}
        for word in filter(None, (part.strip() for part in text.split(","))):
            kind, colon, name = word.partition(":")
            name = name.strip()
            if word in flags:
                flags[word] = True
            elif colon and kind in lists:
                lists[kind].append(name)
                if name not in known:
                    problems.append(
                        f"{VARIABLE}: {kind}:{name} names no fix{did_you_mean(name, sorted(known))}"
                    )
            elif f"{kind}:{name}" in options:
                chosen.append(f"{kind}:{name}")
            else:
                choices = [*WORDS, "only:<id>", "skip:<id>", "newer:<id>", *options]
                hint = did_you_mean(word, [*choices, *sorted(known)])
                if word in known:
                    hint = f"; to select a fix write only:{word} or skip:{word}"
                problems.append(f"{VARIABLE}: {word!r} is none of {', '.join(choices)}{hint}")
        self.text = text
        self.off, self.strict, self.debug = flags["off"], flags["strict"], flags["debug"]
        self.hint, self.claimed = flags["hint"], flags["claimed"]
        self.newer: bool | tuple[str, ...] = flags["newer"] or tuple(newer)
        self.only, self.skip, self.problems = tuple(only), tuple(skip), tuple(problems)
        self.options = tuple(dict.fromkeys(chosen))
        self._meant = {word: known.get(word, ()) for word in (*only, *skip, *newer)}

    def refusal(self, target: str) -> str:
        """Why the user does not want this target patched, as a sentence; empty if the user does."""
        if self.off:
            return f"switched off by {VARIABLE}=off"
        for word in self.skip:
            if target in self._meant[word]:
                return f"switched off by {VARIABLE}=skip:{word}"
        if self.only and not any(target in self._meant[word] for word in self.only):
            return f"not selected: {VARIABLE}=only:{',only:'.join(self.only)}"
        return ""

    def wants_newer(self, target: str) -> bool:
        """Whether the user wants this target patched above its claimed range, if its probe finds the bug."""
        return self.newer is True or any(target in self._meant[word] for word in self.newer or ())

    def to_dict(self) -> dict[str, object]:
        """The settings as data."""
        return {
            "variable": VARIABLE,
            "text": self.text,
            "off": self.off,
            "strict": self.strict,
            "debug": self.debug,
            "claimed": self.claimed,
            "hint": self.hint,
            "newer": self.newer if self.newer is True else list(self.newer or ()),
            "only": list(self.only),
            "skip": list(self.skip),
            "options": list(self.options),
            "problems": list(self.problems),
        }


def did_you_mean(word: str, known: "Iterable[str]") -> str:
    """The end of an error message, with the closest known words."""
    import difflib  # only for an error message: it loads `re`

    near = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else "; see `python -m diffusers_quantfix status`"
