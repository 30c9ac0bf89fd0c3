"""`explain PIPELINE`: the names that people give it, the answer, and the results of which it tells."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diffusers_quantfix.advisories import pipelines
from diffusers_quantfix.commands import explain, pipeline
from tests.pipelines import packed, results, table

DATA = pipelines.read()
LIMIT = 60_000  # bytes of the wheel


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("FluxPipeline", "FluxPipeline"),
        ("diffusers.FluxPipeline", "FluxPipeline"),
        ("Flux", "FluxPipeline"),
        ("flux pipeline", "FluxPipeline"),
        ("FLUX.1-dev", "FluxPipeline"),
        ("flux 2", "Flux2Pipeline"),
        ("wan 2.2", "WanPipeline"),
        ("wan video", "WanPipeline"),
        ("hunyuan video", "HunyuanVideoPipeline"),
        ("sdxl", "StableDiffusionXLPipeline"),
        ("SD 1.5", "StableDiffusionPipeline"),
        ("stable diffusion 3", "StableDiffusion3Pipeline"),
        ("qwen image", "QwenImagePipeline"),
        ("Anima", "AnimaModularPipeline"),
        ("I2VGenXLPipeline", "I2VGenXLPipeline"),
        # descriptions of bugs, and words that are no name
        ("flux pipeline crashes", ""),
        ("FluxPipeline: Cannot copy out of meta tensor; no data!", ""),
        ("sdxl lora has no effect", ""),
        ("the pipeline", ""),
        ("image", ""),
        ("out of memory", ""),
        ("bnb-quant-state-code", ""),
        ("", ""),
        ("2.2", ""),
    ],
)
def test_a_name_in_the_words_of_a_person(words, name):
    assert pipelines.find(words, DATA) == name


@pytest.mark.parametrize("file", table.files())
def test_what_is_packed_is_what_was_seen(file):
    found = table.files()[file]
    release = found["versions"]["diffusers"]
    for name, backends in found["outcomes"].items():
        tested = pipelines.tested(name, DATA, release)
        assert tested.release == release
        if any(one.get("build", results.EXACT) != results.EXACT for one in backends.values()):
            assert tested.not_built and not tested.outcomes, name
            continue
        seen = {(one.backend, one.placement): one for one in tested.outcomes}
        said = {
            (backend, placement): outcome
            for backend, outcomes in backends.items()
            for placement, outcome in outcomes.items()
            if placement not in table.STEPS
        }
        for backend, outcomes in backends.items():  # what does not load says so in every placement
            if outcomes.get("load", results.EXACT) != results.EXACT:
                said |= {(backend, placement): outcomes["load"] for placement in DATA["placements"]}
        assert seen.keys() == said.keys(), name
        for key, outcome in said.items():
            signs = {"exact": "=", "upstream's": "u", "fails": "x"}
            assert seen[key].sign == signs[table.kind(outcome)]
            assert seen[key].reason in outcome and bool(seen[key].reason) == (outcome != results.EXACT)


def test_a_pipeline_that_does_not_load_or_is_wrong_is_refused_with_its_reason():
    outcomes = {
        "bnb-int8": {"build": "exact", "load": "ValueError: no. More of it."},
        "bnb-nf4": {"build": "exact", "load": "exact", "to": "exact", "sequential": "differs by 2"},
    }
    made = packed.packed(
        {"results.json": {"versions": {"diffusers": "1.0"}, "outcomes": {"APipeline": outcomes}}}
    )
    found = pipelines.tested("APipeline", made, "1.0")
    assert [(one.backend, one.placement, one.sign, one.reason) for one in found.outcomes] == [
        ("bnb-int8", "to", "x", "ValueError: no."),
        ("bnb-int8", "sequential", "x", "ValueError: no."),
        ("bnb-nf4", "to", "=", ""),
        ("bnb-nf4", "sequential", "x", "differs by 2"),
    ]
    with pytest.raises(ValueError, match="names no placement elsewhere"):
        outcomes["bnb-nf4"]["elsewhere"] = "exact"
        packed.packed(
            {"results.json": {"versions": {"diffusers": "1.0"}, "outcomes": {"APipeline": outcomes}}}
        )


@pytest.mark.parametrize(
    ("installed", "release", "said"),
    [
        ("0.42.1", "0.42.1", "which is installed"),
        ("0.43.0.dev0", "0.42.1", "the nearest tested release to the installed 0.43.0.dev0"),
        ("0.40.0", "0.38.0", "the nearest tested release to the installed 0.40.0"),
        ("0.32.2", "0.31.0", "the nearest tested release to the installed 0.32.2"),
        ("0.30.0", "0.31.0", "the nearest tested release to the installed 0.30.0"),
        (None, "0.42.1", "not installed here"),
        ("", "0.42.1", "the nearest tested release"),
    ],
)
def test_the_installed_release_or_the_nearest_one(monkeypatch, installed, release, said):
    monkeypatch.setattr(pipeline, "installed_version", lambda name: installed)
    found = pipeline.answer("flux")
    assert found["release"] == release
    assert f"FluxPipeline, quantized, on diffusers {release}" in (rows := printed(found))
    assert said in rows


def test_a_release_that_lacks_the_pipeline(monkeypatch):
    monkeypatch.setattr(pipeline, "installed_version", lambda name: "0.35.2")
    found = pipeline.answer("Flux2Pipeline")
    assert found["lacking"] and found["release"] != "0.35.2"
    assert "0.35.2, which is installed, does not have it" in printed(found)


def test_a_release_on_which_it_was_not_built(monkeypatch):
    """The reason is said, and nobody is sent to another release: the installed one has the pipeline."""
    monkeypatch.setattr(pipeline, "installed_version", lambda name: "0.33.1")
    assert "build" in table.files()["results-D07.json"]["outcomes"]["WanVideoToVideoPipeline"]["plain"]
    found = pipeline.answer("WanVideoToVideoPipeline")
    assert not found["lacking"] and found["release"] == "0.33.1"
    assert found["not_built"]


def printed(found) -> str:
    return " ".join(" ".join(pipeline.lines(found)).split())


@pytest.mark.parametrize("file", table.files())
def test_each_answer_fits_and_names_each_reason(monkeypatch, file):
    release = table.files()[file]["versions"]["diffusers"]
    monkeypatch.setattr(pipeline, "installed_version", lambda name: release)
    monkeypatch.setattr(pipeline.pipelines, "read", lambda: DATA)
    for name in pipelines.names(DATA):
        found = pipeline.answer(name)
        rows = pipeline.lines(found)
        assert max(map(len, rows)) <= 80
        assert found["not_built"] or found["proved"], name
        if not found["not_built"]:
            quantized = [one for one in found["refused"] if one["backend"] in pipelines.BACKENDS]
            assert all(one["reason"] in printed(found) for one in quantized)
        # The table stands on the first screen.
        assert sum(row.startswith(tuple(pipelines.TOGETHER)) for row in rows) <= 20


def test_the_command(capsys):
    assert explain_of("WanPipeline") == 0
    assert capsys.readouterr().out.startswith("WanPipeline, quantized, on diffusers ")
    assert explain_of("I2VGenXL", "--json") == 1
    assert json.loads(capsys.readouterr().out)["not_built"]
    assert explain_of("flux", "--script") == 2
    assert explain_of("flux", "pipeline", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] == "FluxPipeline"


def explain_of(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return explain.run(parser.parse_args(arguments))


def test_a_file_of_that_name_is_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "flux").write_text("Cannot copy out of meta tensor; no data!")
    monkeypatch.chdir(tmp_path)
    assert explain_of("flux") == 0
    assert "quantized, on diffusers" not in capsys.readouterr().out


def test_the_data_is_small_and_read_for_nothing_else():
    assert pipelines.FILE.stat().st_size < LIMIT
    code = (
        "import sys; from diffusers_quantfix.__main__ import main\n"
        "sys.addaudithook(lambda event, all: event == 'open' and 'pipelines.json' in str(all[0]) and sys.exit(9))\n"
        "main(['explain', 'bnb-quant-state-code'])"
    )
    for more, end in (("", 0), ("; main(['explain', 'flux'])", 9)):
        done = subprocess.run([sys.executable, "-c", code + more], capture_output=True, check=False)
        assert done.returncode == end
