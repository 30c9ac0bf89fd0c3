"""`explain` on what people wrote: public threads, plain sentences, other languages, and what is not ours."""

from __future__ import annotations

import pathlib
import re

import pytest

from diffusers_quantfix.advisories import symptoms
from diffusers_quantfix.fixes import NAMES
from diffusers_quantfix.fixes.targets import declaration, declarations

DECLARATIONS = declarations()
# file -> kind -> the shares whose first answer, and one of whose first three, is right; of `foreign` those that name no
# fix.  The second file is of threads that nobody looked at when the patterns were written.
ENOUGH = {
    "reports.txt": {
        "error": (0.9, 0.95),
        "title": (0.8, 0.9),
        "sentence": (0.85, 0.95),
        "foreign": (0.95, 0.0),
    },
    "reports_aside.txt": {
        "error": (0.8, 0.8),
        "title": (0.35, 0.4),
        "sentence": (0.3, 0.35),
        "foreign": (0.7, 0.0),
    },
}
# file -> [(kind, fixes that are a right first answer, where it stands, text)]
REPORTS = {
    file: [
        (kind, tuple(wanted.split(", ")), source, text)
        for kind, wanted, source, text in re.findall(
            r"(?ms)^=== (\w+) \| (.*?) \| (.*?)\n(.*?)(?=\n===|\Z)",
            pathlib.Path(__file__).with_name(file).read_text(encoding="utf-8"),
        )
    ]
    for file in ENOUGH
}


def answers(text: str) -> list[str]:
    """The fixes that `explain` names, whatever is installed here."""
    found = symptoms.search(text, DECLARATIONS, lambda name: None)
    if found and not found[0].by_message and symptoms.look_alike(text):
        return []
    return [match.fix.id for match in found]


@pytest.mark.parametrize("file", ENOUGH)
def test_the_reports_are_about_fixes_that_are_there(file: str):
    assert len(REPORTS[file]) >= 80
    assert {fix_id for _, wanted, _, _ in REPORTS[file] for fix_id in wanted} <= {*NAMES, "none"}
    assert {kind for kind, _, _, _ in REPORTS[file]} == set(ENOUGH[file])


def test_what_is_kept_aside_is_of_other_threads():
    used, aside = ({source for _, _, source, _ in rows if source != "written"} for rows in REPORTS.values())
    assert not used & aside
    assert len(aside) >= 75


@pytest.mark.parametrize(("file", "kind"), [(file, kind) for file, kinds in ENOUGH.items() for kind in kinds])
def test_enough_are_answered(file: str, kind: str):
    first = three = 0
    missed = []
    rows = [row for row in REPORTS[file] if row[0] == kind]
    for _, names, source, text in rows:
        wanted = {declaration(name).id for name in names if name != "none"}
        found = answers(text)
        is_first = not found if kind == "foreign" else bool(found) and found[0] in wanted
        first += is_first
        three += bool(set(found[:3]) & wanted)
        if not is_first:
            missed.append(f"{source}: {found[:3]} instead of {wanted}")
    assert first / len(rows) >= ENOUGH[file][kind][0], "\n".join(missed)
    assert three / len(rows) >= ENOUGH[file][kind][1], "\n".join(missed)


@pytest.mark.parametrize(
    "fix_id", [fix.id for fix in DECLARATIONS if any("/issues/" in link for link in fix.upstream)]
)
def test_a_link_to_its_issue_finds_the_fix(fix_id: str):
    links = [link for link in declaration(fix_id).upstream if "/issues/" in link]
    sharing = sum(links[0] in fix.upstream for fix in DECLARATIONS)
    matches = symptoms.search(f"I have the same as {links[0]}", DECLARATIONS, lambda name: None)
    assert fix_id in [match.fix.id for match in matches if match.by_message][:sharing]


@pytest.mark.parametrize(
    ("text", "fix_id"),
    [
        # what a shell leaves of a message in double quotes: it runs what stands between backticks
        (
            " is not supported for  bitsandbytes models. Please use the model as it is",
            "diffusers-8bit-model-gate",
        ),
        (
            "Calling  is not supported for  or  quantized models. Please use the model",
            "transformers-8bit-cuda",
        ),
        ("has been loaded in  8bit and moving it to cpu via  is not supported.", "diffusers-8bit-move-gate"),
        ("Supplied state dict for x does not contain  and possibly other", "diffusers-sharded-companions"),
        ("Casting a quantized model to a new  is unsupported.", "diffusers-quantized-cast"),
        ("Currently, providing  is not supported for quantized models", "diffusers-param-device"),
        # escaped by Markdown and by HTML, and wrapped by a terminal in the middle of a word
        (r"KeyError: None from GGUFParameter.\_\_new\_\_", "diffusers-gguf-sequential"),
        (
            "Missing quantization component &#39;SCB&#39; in diffusers/models/modeling_utils",
            "diffusers-sharded-companions",
        ),
        (
            "Blockwise quantization only supports 16/32-bit flo\nats, but got torch.uint8",
            "bnb-quant-state-meta",
        ),
    ],
)
def test_a_mangled_message_is_found(text: str, fix_id: str):
    assert declaration(fix_id).id in answers(text)[:3]


def test_the_versions_of_the_text_are_read():
    text = "bitsandbytes==0.45.2\n- `diffusers` version: 0.31.0\nPyTorch version (GPU?): 2.5.1+cu121\npeft-0.14.0"
    assert symptoms.stated_versions(text) == {
        "bitsandbytes": "0.45.2",
        "diffusers": "0.31.0",
        "torch": "2.5.1",
        "peft": "0.14.0",
    }
    assert not symptoms.stated_versions(
        "please install bitsandbytes >= 0.43.2, it uses 24.5 GB of torch 99.9% memory"
    )
