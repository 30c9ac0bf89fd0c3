"""`explain`: a page for every fix, and the way to it from an error message."""

from __future__ import annotations

import builtins
import json
import os
import pathlib
import random
import re
import resource
import subprocess
import symtable
import sys

import pytest

from diffusers_quantfix import text as printed
from diffusers_quantfix.advisories import symptoms
from diffusers_quantfix.commands import explain as command
from diffusers_quantfix.commands import reproduction
from diffusers_quantfix.commands.pages import page
from diffusers_quantfix.fixes import NAMES
from diffusers_quantfix.fixes.targets import TARGETS, declaration, declarations
from tests.gate import gate
from tests.marks import rest_is_long

DECLARATIONS = declarations()
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "bitsandbytes", "optimum", "peft", "numpy")

# id -> (recorded or written, text); the head of the file says what that means.
ERRORS = {
    fix_id: (kind, text)
    for fix_id, kind, text in re.findall(
        r"(?ms)^=== (\S+) \((\w+)\)\n(.*?)\n(?=\n===|\Z)",
        (pathlib.Path(__file__).with_name("errors.txt")).read_text(encoding="utf-8"),
    )
}
# Frames of this one are those of the next two as well: the component's input was made on the device of its pipeline.
SHARED_FRAMES = {
    "diffusers-meta-pipeline-device": 3,
    "diffusers-meta-component-device": 2,  # the same frames, whether the pipeline or the program read the device
    "bnb-cpu-half-blockwise": 2,
    "diffusers-group-offload-pipeline-device": 2,  # LEdits++ does the same under model offload
}


def explain(
    *arguments: str, given: bytes = b"", options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, *options, "-m", "diffusers_quantfix", "explain", *arguments]
    return subprocess.run(words, input=given, capture_output=True, check=False)


def ids(text: str) -> list[str]:
    """The fixes that a text leads to, whatever is installed here."""
    return [match.fix.id for match in symptoms.search(text, DECLARATIONS, lambda name: None)]


# ------------------------------------------------------------------ the page of one fix


def test_the_page_names_what_a_person_asks_for():
    done = explain("bnb-quant-state-code")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.decode().split())
    for text in (
        "need to be on the same GPU",
        "bitsandbytes 0.45.3",
        "issues/1527",
        "skip:bnb-quant-state-code",
    ):
        assert text in said
    assert max(len(line) for line in done.stdout.decode().splitlines() if "https://" not in line) <= 80


def test_the_page_for_machines():
    data = json.loads(explain("bnb-quant-state-code", "--json").stdout)
    assert data["id"] == "bnb-quant-state-code"
    assert {"symptom", "fixed_in", "text", "versions", "upstream", "claims"} <= set(data)
    assert "state" not in data, "the board was not asked"


@pytest.mark.long
def test_the_state_here_is_told_where_it_is_asked_for():
    pytest.importorskip("bitsandbytes", reason="the stack is not installed")
    data = json.loads(explain("bnb-int8-reload", "--json", "--here").stdout)
    assert data["state"] and data["reason"]


def test_docstrings_may_be_dropped():
    assert explain("bnb-quant-state-code", options=("-OO",)).stdout == explain("bnb-quant-state-code").stdout


def test_an_unknown_id_suggests_the_nearest():
    done = explain("bnb-quant-state")
    assert done.returncode == 2
    assert b"did you mean bnb-quant-state-" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("fix_id", NAMES)
def test_every_fix_has_a_page(fix_id):
    fix = declaration(fix_id)
    assert fix.symptom and fix.title
    assert all(link.startswith("https://") for link in fix.upstream)
    lines = page(fix_id)
    assert lines[0].startswith((f"{fix_id}: ", f"{fix_id} (a target of"))
    for line in lines:
        longest = max(map(len, line.split()), default=0)  # a name of code or a link is not broken
        assert len(line) <= printed.WIDTH or longest + len("fixed upstream   ") > printed.WIDTH, line


# ------------------------------------------------------------------ from a text to a fix


@pytest.mark.parametrize("fix_id", TARGETS)
def test_the_real_error_of_a_fix_leads_to_it(fix_id):
    # A new fix is found by its symptom until somebody writes its error down.
    _, text = ERRORS.get(fix_id, ("", symptoms.first_sentence(declaration(fix_id).symptom)))
    assert TARGETS[fix_id].fix in ids(text)[: SHARED_FRAMES.get(fix_id, 1)]


@pytest.mark.parametrize("fix_id", TARGETS)
def test_the_symptom_of_a_fix_leads_to_it(fix_id):
    assert TARGETS[fix_id].fix in ids(symptoms.first_sentence(declaration(fix_id).symptom))


RECORDED = [fix_id for fix_id, (kind, _) in ERRORS.items() if kind == "recorded"]
# A message that is somebody else's as well: a frame of the traceback has to stand beside it.
NOT_ALONE = (
    "accelerate-4bit-hooks-follow",
    "accelerate-attention-offload",
    "accelerate-partly-offloaded",
    "accelerate-torchao-save-model",
    "accelerate-torchao-save-state",
    "bnb-cpu-half-blockwise",
    "bnb-gemv-shape",
    "bnb-int8-input-layout",
    "bnb-linear8bit-move",
    "bnb-params4bit-shared-state",
    "diffusers-ace-step-tokenizer-weights",
    "diffusers-adapter-dtype",
    "diffusers-control-lora-quantized",
    "diffusers-controlnet-union-attention",
    "diffusers-custom-diffusion-dtype",
    "diffusers-device-map-hooks",
    "diffusers-fuse-lora-offloaded",
    "diffusers-fuse-qkv-quantized",
    "diffusers-gguf-kept-modules",
    "diffusers-group-offload-attention",
    "diffusers-group-offload-bnb",
    "diffusers-group-offload-containers",
    "diffusers-group-offload-direct-calls",
    "diffusers-group-offload-exchanged",
    "diffusers-group-offload-modular-device",
    "diffusers-group-offload-nested-lists",
    "diffusers-group-offload-quanto",
    "diffusers-group-offload-replaced",
    "diffusers-group-offload-tied-parameters",
    "diffusers-group-offload-vae-blocks",
    "diffusers-ideogram4-encoder",
    "diffusers-ip-adapter-unet",
    "diffusers-latte-position-dtype",
    "diffusers-layerwise-casting-lora",
    "diffusers-legacy-model-config",
    "diffusers-legacy-model-load",
    "diffusers-modular-guard",
    "diffusers-pix2pix-zero-grad",
    "diffusers-prior-group-offload",
    "diffusers-quanto-reload",
    "diffusers-shap-e-quantized-renderer",
    "diffusers-text-kv-cache-group-offload",
    "diffusers-textual-inversion-group-offload",
    "diffusers-unidiffuser-decoder",
    "diffusers-unidiffuser-decoder-old",
    "peft-8bit-dequantize-cpu",
    "peft-loha-packed-weight",
    "quanto-autocast-backward",
    "quanto-offloaded-backward",
    "quanto-share-memory",
    "quanto-strided-input",
    "quanto-tinygemm-autocast",
    "quanto-weight-gradient",
    "torchao-inference-mode",
    "torchao-layer-pickle",
    "torchao-share-memory",
    "transformers-4bit-cuda",
    "transformers-8bit-ignored-companions",
    "transformers-clap-token-types",
    "transformers-quantized-resave",
    "transformers-save-offloaded-tied",
    "transformers-siglip-head-attention",
    "transformers-siglip2-head-attention",
)


def test_a_message_of_many_programs_alone_asks_for_the_traceback():
    """Most people who meet it have none of our bugs; the ones who have one are told how to find it."""
    done = explain(
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices"
    )
    assert b"several bugs end in this message: pass the whole traceback" in b" ".join(done.stdout.split())


@pytest.mark.parametrize("fix_id", [fix_id for fix_id in RECORDED if fix_id not in NOT_ALONE])
def test_the_message_alone_finds_it_too(fix_id):
    last = [line for line in ERRORS[fix_id][1].splitlines() if not line.startswith((" ", "Traceback"))][-1]
    found = symptoms.search(last, DECLARATIONS, lambda name: None)
    (match,) = [one for one in found if one.fix.id == TARGETS[fix_id].fix]
    assert match.by_message


def test_most_texts_are_what_upstream_raised():
    assert sum(kind == "recorded" for kind, _ in ERRORS.values()) >= 30
    assert set(ERRORS) <= set(TARGETS)
    assert len(ERRORS) > 0.9 * len(TARGETS)


def test_scales_that_are_lost_when_a_lora_is_fused():
    """bitsandbytes 0.48.2 with peft: the first patch is enough where nobody asked for offload, and under sequential
    offload the other two are needed as well."""
    text = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/peft/tuners/lora/bnb.py", line 110, in merge
    output = dequantize_bnb_weight(weight, state=state)
  File "/venv/lib/python3.11/site-packages/peft/utils/integrations.py", line 137, in dequantize_bnb_weight
    dequantized = bnb.functional.int8_vectorwise_dequant(weight.data, state.SCB.to(weight.data.device))
AttributeError: 'NoneType' object has no attribute 'to'"""
    matches = symptoms.search(text, DECLARATIONS, lambda name: None)
    assert {match.fix.id for match in matches if match.by_message} == {
        "diffusers-lora-offload-flip",
        "diffusers-fuse-lora-offloaded",
        "accelerate-8bit-offload-state",
    }


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'foo'",
        "ZeroDivisionError: division by zero",
        "ValueError: too many values to unpack (expected 2)",
        "AttributeError: 'NoneType' object has no attribute 'shape'",
        "Segmentation fault (core dumped)",
        "AssertionError",
        "hello world",
        "",
    ],
)
def test_what_is_none_of_them_leads_nowhere(text):
    assert ids(text) == []
    assert not symptoms.look_alike(text)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has",
            "memory is full",
        ),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float", "differ in dtype"),
        ("RuntimeError: expected scalar type Half but found Float", "differ in dtype"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)", "shapes do not fit"),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", "shapes do not fit"),
        (
            "ValueError: img.weight has an expected quantized shape of: (24576, 4096), but received shape: (1, 2)",
            "shapes do not fit",
        ),
        (
            "ValueError: Cannot load  because x_embedder.weight expected shape tensor(..., device='meta', "
            "size=(3072, 64)), but got torch.Size([3072, 384])",
            "shapes do not fit",
        ),
        ("ValueError: Target modules {'proj_out'} not found in the base model. Please check", "this LoRA"),
        ("KeyError: 'time_text_embed.timestep_embedder.linear_1.weight._data'", "optimum-quanto"),
        (
            "ValueError: Calling `to()` is not supported for `4-bit` quantized models with the installed version "
            "of bitsandbytes. The current device is `cuda:0`.",
            "-U bitsandbytes",
        ),
        ("RuntimeError: \"addmm_cuda\" not implemented for 'Float8_e4m3fn'", "layerwise_casting"),
        ("ValueError: Unknown quantization type, got sdnq - supported types are: ['gguf']", "does not know"),
        ("ModuleNotFoundError: No module named 'diffusers'", "doctor"),
        (
            "RuntimeError: Failed to import diffusers.pipelines.flux.pipeline_flux because of the following error "
            "(look up to see its traceback): name 'logger' is not defined",
            "torchao<0.16",
        ),
        (
            'RuntimeError: pool INTERNAL ASSERT FAILED at "aten/src/ATen/ParallelOpenMP.cpp":64, please report a bug '
            "to PyTorch. Invalid thread pool!",
            "OMP_NUM_THREADS",
        ),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "other GPUs"),
    ],
)
def test_what_looks_like_one_of_them_has_its_sentence(text, word):
    assert word in symptoms.look_alike(text)
    # Words that happen to agree give way to the sentence; a message would not.
    assert not any(match.by_message for match in symptoms.search(text, DECLARATIONS, lambda name: None))


def test_versions_decide_between_equals():
    text = "Missing quantization component `SCB`"
    old = {"transformers": "4.50.0", "diffusers": "0.31.0", "bitsandbytes": "0.45.0"}
    new = {**old, "transformers": "4.57.6", "diffusers": "0.36.0"}
    first = [symptoms.search(text, DECLARATIONS, one.get)[0].fix.id for one in (old, new)]
    assert first == ["transformers-sharded-companions", "diffusers-sharded-companions"]
    stated = f"{text}\ntransformers==4.50.0\ndiffusers==0.31.0"
    assert symptoms.search(stated, DECLARATIONS, new.get)[0].fix.id == "transformers-sharded-companions"


def test_a_traceback_may_be_boxed_coloured_or_from_windows():
    _, text = ERRORS["bnb-quant-state-meta"]
    boxed = "\n".join(f"│ {line:<200} │" for line in text.replace("/", "\\").splitlines())
    assert ids(boxed)[0] == ids(text)[0] and set(ids(boxed)) == set(ids(text))
    assert ids(f"\x1b[31m{text}\x1b[0m") == ids(text)
    assert ids(text.replace("'", "`").replace('"', "”"))[0] == "bnb-quant-state-meta"


@pytest.mark.parametrize("last", ["sequential_cpu_offload", "GGUFParameter"])
def test_three_ways_to_give_a_text(tmp_path, last):
    text = f"KeyError: None\n  File 'diffusers/quantizers/gguf/utils.py', line 1, in __new__  {last}"
    file = tmp_path / "log.txt"
    file.write_text(text)
    outputs = {
        explain(text).stdout,
        explain(str(file)).stdout,
        explain("-", given=text.encode()).stdout,
        explain("-", given=text.encode("utf-16")).stdout,
    }
    in_words = explain(*text.split()).stdout
    if last == "sequential_cpu_offload":
        outputs.add(in_words)
    assert len(outputs) == 1
    for output in (
        *outputs,
        in_words,
    ):  # on one line the error's name and the frame weigh less: the rest may differ
        assert output.startswith(b"diffusers-gguf-sequential: GGUF models ")


@pytest.mark.parametrize("name", ["missing.log", "./trace", "/none/trace.txt", "C:\\logs\\a.txt", "~/error"])
def test_a_mistyped_file_is_no_error_message(name):
    """It was searched for as a text: "no known bug matches"."""
    done = explain(name)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"there is no such file" in done.stderr


@pytest.mark.parametrize(
    "text", ["ZeroDivisionError", "RuntimeError:No", "aten::_convert_weight_to_int4pack", "weight.absmax"]
)
def test_one_word_may_be_an_error_message(text):
    assert explain(text).returncode in (0, 1)


def test_the_answer_for_machines():
    data = json.loads(explain("--json", "Cannot copy out of meta tensor; no data!").stdout)
    assert data["found"]["id"] and len(data["alternatives"]) >= 2
    done = explain("--json", "ZeroDivisionError")
    assert (done.returncode, json.loads(done.stdout)["found"]) == (1, None)


def test_the_answer_fits_a_screen_and_begins_with_what_to_do():
    text = "Input tensors need to be on the same GPU, but found the following tensor and device combinations"
    lines = explain(f"{text}\nbitsandbytes==0.45.2").stdout.decode().splitlines()
    assert lines[0].startswith("bnb-quant-state-code: ") and len(lines) <= 15
    assert lines[1].startswith("here   affected: bitsandbytes 0.45.2 (the versions in your text)")
    assert lines[2].startswith("do     put `import diffusers_quantfix` first in the program")
    assert "or upgrade: bitsandbytes 0.45.3 fixes it" in lines[3]
    other = explain(f"{text}\nbitsandbytes==0.50.2").stdout.decode()
    assert "here   not affected: bitsandbytes 0.50.2" in other and "probably another bug" in other
    assert b"\nCause: " in explain(text, "--details").stdout


def test_what_only_sounds_like_a_bug_is_said_with_care():
    done = explain("the output of my 8-bit model is wrong after .to('cpu') and .to('cuda')")
    assert done.returncode == 0 and done.stdout.startswith(
        b"no known error message; by the wording it may be:\n"
    )
    assert not json.loads(explain("--json", "8-bit model stays on the GPU after .to('cpu')").stdout)[
        "certain"
    ]


def test_an_ambiguous_message_asks_for_the_traceback():
    said = " ".join(explain("Cannot copy out of meta tensor; no data!").stdout.decode().split())
    assert "does not tell them apart" in said
    done = explain("ZeroDivisionError: division by zero")
    assert done.returncode == 1
    assert b"what to try" in done.stdout


def test_without_our_own_dependency():
    program = (
        "import sys; sys.modules['packaging'] = sys.modules['packaging.version'] = None\n"
        "from diffusers_quantfix.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    for arguments, code in ((["explain", "KeyError: None from GGUFParameter"], 0), (["doctor"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero here")
def test_an_input_that_cannot_be_read_is_one_sentence(tmp_path):
    for arguments in (("/dev/zero",), (str(tmp_path),), ()):
        done = explain(*arguments)
        assert done.returncode == 2, arguments
        assert len(done.stderr.splitlines()) == 1 and not done.stdout
    done = explain("-", given=b"x" * (command.INPUT_LIMIT + 1))
    assert done.returncode == 2 and b"longer than 4 MB" in done.stderr


@pytest.mark.parametrize("texts", rest_is_long([40, 120, 300], 40))
def test_no_input_gives_a_traceback(capsys, texts):
    """Bytes, half tracebacks, and what makes regular expressions slow."""
    chance = random.Random(5)
    pieces = [
        "File '",
        "', line 1, in to",
        " in ",
        "KeyError: '",
        "\x00",
        "\ud800",
        "│",
        "'",
        "`",
        "\n",
        "a" * 5000,
    ]
    pieces += [text for _, text in ERRORS.values()]
    options = type("Options", (), {"here": False, "json": False, "details": False})
    for _ in range(texts):
        text = "".join(
            chance.choice(pieces)[: chance.randrange(1, 3000)] for _ in range(chance.randrange(12))
        )
        text += bytes(chance.randrange(256) for _ in range(40)).decode("utf-8", errors="replace")
        assert command._explain_text(text, options) in (0, 1)
        capsys.readouterr()


@pytest.mark.parametrize(
    "unit",
    rest_is_long(
        ["1", "File '", "a'", "KeyError: 'transformer_blocks.", "in ", "Input type (", "shape '["],
        "1",
        "shape '[",
    ),
)
def test_a_long_text_takes_no_longer(unit):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    symptoms.search(unit * (symptoms.LIMIT // len(unit)), DECLARATIONS, lambda name: None)
    symptoms.look_alike(unit * (symptoms.LIMIT // len(unit)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 5


# ------------------------------------------------------------------ for upstream


# Its case takes the time limit of the fix itself down.
NO_SCRIPT = ("quanto-extension-lock",)


def test_a_case_that_needs_this_package_is_one_sentence():
    done = explain(NO_SCRIPT[0], "--script")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"cannot run without it" in done.stderr


@pytest.mark.parametrize("fix_id", [fix_id for fix_id in TARGETS if fix_id not in NO_SCRIPT])
def test_a_script_stands_alone(fix_id):
    text = reproduction.script(fix_id)
    assert "diffusers_quantfix" not in text
    assert declaration(fix_id).title.lower() in text.lower()
    defined = set(dir(builtins)) | {"__name__", "__file__"}
    tables = [symtable.symtable(text, fix_id, "exec")]
    defined |= {
        symbol.get_name()
        for symbol in tables[0].get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    while tables:
        table = tables.pop()
        tables += table.get_children()
        wanted = {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_global() and symbol.is_referenced()
        }
        assert not wanted - defined
    functions = re.findall(r"(?m)^(?:def|class) (\w+)", text)
    assert len(functions) == len(set(functions))


@pytest.mark.thorough
def test_a_script_is_a_program_of_its_own(tmp_path):
    """`tests/fixes/test_verify_cases.py` runs all others within the test process; the last one ends its process."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=ImportError)
    for fix_id in ("diffusers-balanced-lost-component", "quanto-int8-cpu-kernel"):
        if not gate(fix_id)[0]:
            continue
        (tmp_path / "script.py").write_text(reproduction.script(fix_id))
        done = subprocess.run(
            [sys.executable, "script.py"], capture_output=True, text=True, check=False, cwd=tmp_path,
            env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DIFFUSERS_QUANTFIX_AUTO": "0"},
        )  # fmt: skip
        assert done.returncode != 0
        assert "lost" not in fix_id or "AssertionError: " in done.stderr, done.stderr


@pytest.mark.parametrize("fix_id", [fix.id for fix in DECLARATIONS if not fix.upstream])
def test_every_defect_that_upstream_does_not_know_has_its_report(fix_id):
    text = reproduction.report(fix_id)
    assert "quantfix" not in text
    assert text.startswith(f"{declaration(fix_id).title}\n\n### Describe the bug\n\n")
    assert "\nSymptom: " in text and "\nPatch: " not in text and "\nUpstream: " not in text
    program = text.partition("```python\n")[2].partition("```")[0]
    compile(program, fix_id, "exec")


def test_a_report_is_for_what_upstream_does_not_know():
    done = explain("quanto-weight-clone", "--report")
    assert done.returncode == 0
    for part in (b"### Describe the bug", b"Symptom: ", b"Cause: ", b"```python", b"### System info"):
        assert part in done.stdout
    assert b"Patch: " not in done.stdout
    known = explain("bnb-quant-state-meta", "--report")
    assert known.returncode == 2
    assert b"is already reported upstream: https://github.com/" in known.stderr
    assert explain("some text", "--script").returncode == 2


# ------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("what", ["bnb-quant-state-code", "Cannot copy out of meta tensor; no data!"])
def test_no_library_is_imported(what):
    program = (
        "import sys; from diffusers_quantfix.__main__ import main; main(['explain', sys.argv[1]]); "
        "print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, what], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in re.findall(r"'([\w.]+)'", done.stderr)}
    assert not loaded & set(LIBRARIES)


@pytest.mark.parametrize("what", ["bnb-quant-state-code", "Cannot copy out of meta tensor; no data!"])
def test_it_is_fast(what):
    """Nowhere near the 16 s that importing the libraries takes; `tests.benchmarks commands` measures the 0.2 s."""
    times = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        explain(what)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 3
