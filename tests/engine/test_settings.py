"""The one environment variable: every word, repeated, with blanks, mistyped."""

from __future__ import annotations

import json

import pytest

from diffusers_quantfix.engine.settings import Settings

KNOWN = {name: (name,) for name in ("bnb-code", "bnb-meta", "fix-f")}
SEVERAL = {"fix-both": ("fix-a", "fix-b"), "fix-a": ("fix-a",), "fix-b": ("fix-b",), **KNOWN}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        (" , ,, ", {}),
        ("off", {"off": True}),
        ("strict,debug", {"strict": True, "debug": True}),
        (" strict , strict ,debug ", {"strict": True, "debug": True}),
        ("only:fix-f", {"only": ("fix-f",)}),
        ("only: fix-f ,only:bnb-code", {"only": ("fix-f", "bnb-code")}),
        ("skip:fix-f,off,skip:bnb-code", {"skip": ("fix-f", "bnb-code"), "off": True}),
        ("only:fix-f,skip:fix-f", {"only": ("fix-f",), "skip": ("fix-f",)}),
    ],
)
def test_words(text, wanted) -> None:
    settings = Settings(text, KNOWN)
    plain = {"off": False, "strict": False, "debug": False, "only": (), "skip": ()}
    assert {name: getattr(settings, name) for name in plain} == plain | wanted
    assert settings.problems == ()
    assert settings.to_dict()["text"] == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "of",
            "'of' is none of off, strict, debug, newer, claimed, hint, only:<id>, skip:<id>, newer:<id>; "
            "did you mean off?",
        ),
        ("OFF", "; did you mean off"),
        ("Strict", "; did you mean strict"),
        ("off;strict", "'off;strict' is none of "),
        ("fix-f", "to select a fix write only:fix-f or skip:fix-f"),
        ("only:fix-g", "only:fix-g names no fix; did you mean fix-f?"),
        ("skip:bnb_code", "skip:bnb_code names no fix; did you mean bnb-code?"),
        ("skip:", "skip: names no fix"),
        ("onyl:fix-f", "'onyl:fix-f' is none of"),
        ("1", "'1' is none of"),
        ("only", "did you mean only:<id>"),
        ("only:zzzzzz", "see `python -m diffusers_quantfix status`"),
    ],
)
def test_a_typo_is_one_sentence_with_a_suggestion(text, sentence) -> None:
    settings = Settings(f"debug,{text}", KNOWN)
    assert settings.debug, "the other words count"
    (problem,) = settings.problems
    assert problem.startswith("DIFFUSERS_QUANTFIX: ")
    assert sentence in problem


OPTIONS = ("lib:build", "lib:no-build", "lib:fast")


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", ()),
        ("lib:fast", ("lib:fast",)),
        (" lib:no-build ,lib: fast,lib:fast", ("lib:no-build", "lib:fast")),
        ("strict,skip:fix-f,lib:build", ("lib:build",)),
    ],
)
def test_options_of_fixes(text, chosen) -> None:
    settings = Settings(text, KNOWN, OPTIONS)
    assert settings.options == chosen
    assert settings.to_dict()["options"] == list(chosen)
    assert settings.problems == ()
    assert settings.strict == ("strict" in text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "lib:fsat",
            "'lib:fsat' is none of off, strict, debug, newer, claimed, hint, only:<id>, skip:<id>, newer:<id>, "
            "lib:build, lib:fast, lib:no-build; "
            "did you mean lib:fast",
        ),
        ("lib:no_build", "; did you mean lib:no-build or lib:build?"),
        ("lib:", "; did you mean lib:"),
        ("lbi:fast", "; did you mean lib:fast"),
        ("fast", "; did you mean lib:fast"),
        ("lib:fix-f", "'lib:fix-f' is none of"),
        ("LIB:FAST", "; did you mean lib:fast"),
    ],
)
def test_a_mistyped_option_is_one_sentence_with_a_suggestion(text, sentence) -> None:
    settings = Settings(f"lib:build,{text}", KNOWN, OPTIONS)
    assert settings.options == ("lib:build",), "the other words count"
    (problem,) = settings.problems
    assert sentence in problem


def test_who_is_refused_and_why() -> None:
    def refusals(text):
        return {name: Settings(text, KNOWN).refusal(name) for name in ("fix-f", "bnb-code")}

    assert refusals("strict") == {"fix-f": "", "bnb-code": ""}
    assert refusals("only:fix-f") == {"fix-f": "", "bnb-code": "not selected: DIFFUSERS_QUANTFIX=only:fix-f"}
    assert refusals("skip:fix-f")["fix-f"] == "switched off by DIFFUSERS_QUANTFIX=skip:fix-f"
    assert "skip:fix-f" in refusals("only:fix-f,skip:fix-f")["fix-f"]
    assert refusals("off,only:fix-f")["fix-f"] == "switched off by DIFFUSERS_QUANTFIX=off"
    assert "only:typo" in refusals("only:typo")["fix-f"], "a mistyped selection selects nothing"


PROGRAM = """
    import logging, sys
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append([record.levelname, record.getMessage()])
    logging.getLogger("diffusers_quantfix").addHandler(handler)
    logging.getLogger("diffusers_quantfix").setLevel(logging.INFO)
    import diffusers_quantfix as qf, lib.core, lib.second
    import importlib; importlib.reload(qf)
    qf.apply(); qf.status()
    tell(records=records, states=states("fix-f", "fix-g"), problems=qf.status().settings["problems"],
         runner="diffusers_quantfix.engine.runner" in sys.modules)
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", ["applied", "applied"]),
        ("off", ["disabled", "disabled"]),
        ("only:fix-g", ["disabled", "applied"]),
        ("skip:fix-g", ["applied", "disabled"]),
        ("only:fix-g,skip:fix-g", ["disabled", "disabled"]),
        ("oof,skip:fix-g", ["applied", "disabled"]),
    ],
)
def test_settings_in_a_program(simple, settings, expected) -> None:
    (simple.site / "lib" / "second.py").write_text("def f(): return 'broken'\n")
    simple.fix("fix-g", target="lib.second")
    outcome = simple.run(PROGRAM, settings)
    assert outcome["states"] == expected
    info = [message for level, message in outcome["records"] if level == "INFO"]
    warnings = [message for level, message in outcome["records"] if level == "WARNING"]
    assert len(info) == ("applied" in expected), "one line per process, when something was installed"
    assert (
        warnings
        == outcome["problems"]
        == (
            [
                "DIFFUSERS_QUANTFIX: 'oof' is none of off, strict, debug, newer, claimed, hint, only:<id>, skip:<id>, "
                "newer:<id>; did you mean off?"
            ]
            if "oof" in settings
            else []
        )
    )
    assert not outcome.out, "nothing on stdout, ever"


def test_off_imports_nothing_of_the_engine_and_watches_nothing(simple) -> None:
    outcome = simple.run(
        """
        import sys, diffusers_quantfix, lib.core
        tell(engine=[n for n in sys.modules if n.startswith("diffusers_quantfix.engine.")], f=lib.core.f(),
             finders=[type(finder).__name__ for finder in sys.meta_path])
    """,
        "off",
    )
    assert len(outcome["engine"]) == 2
    assert outcome["f"] == "broken"
    assert "Watcher" not in outcome["finders"]


def test_debug_tells_every_decision_on_standard_error(simple) -> None:
    script = "import diffusers_quantfix, lib.core"
    loud, quiet = simple.run(script, "debug"), simple.run(script)
    assert "diffusers_quantfix: fix-f applied to lib.core.f (lib 1.0)" in loud.err
    assert loud.err.count("patching lib") == 1
    assert not loud.out and not quiet.out and not quiet.err


def test_the_environment_is_read_again_by_apply(simple) -> None:
    outcome = simple.run(
        """
        import os, diffusers_quantfix as qf, lib.core
        first = states("fix-f")
        os.environ["DIFFUSERS_QUANTFIX"] = ""
        second = qf.apply()["fix-f"].state
        qf.revert()
        os.environ["DIFFUSERS_QUANTFIX"] = "off"
        tell(all=[first, second, qf.apply()["fix-f"].state], f=lib.core.f())
    """,
        "skip:fix-f",
    )
    assert outcome.told == {"all": ["disabled", "applied", "disabled"], "f": "broken"}


def test_a_typo_in_the_command_line_tool(simple) -> None:
    outcome = simple.command("status", "--json", settings="stirct,only:fix-f")
    assert outcome.code == 2
    assert outcome.err.count("did you mean strict?") == 1
    (problem,) = json.loads(outcome.out)["settings"]["problems"]
    assert "'stirct' is none of" in problem


def test_a_fix_is_all_of_its_targets_and_a_target_is_itself() -> None:
    skipped = Settings("skip:fix-both", SEVERAL)
    assert [bool(skipped.refusal(name)) for name in ("fix-a", "fix-b", "fix-f")] == [True, True, False]
    assert "DIFFUSERS_QUANTFIX=skip:fix-both" in skipped.refusal("fix-a"), "as the user wrote it"
    assert Settings("skip:fix-b", SEVERAL).refusal("fix-a") == ""
    only = Settings("only:fix-both,only:fix-f", SEVERAL)
    assert [only.refusal(name) for name in ("fix-a", "fix-b", "fix-f")] == ["", "", ""]
    assert Settings("only:fix-a", SEVERAL).refusal("fix-b")
    newer = Settings("newer:fix-both", SEVERAL)
    assert newer.wants_newer("fix-a") and not newer.wants_newer("fix-f")
    assert newer.to_dict()["newer"] == ["fix-both"] and not newer.problems
