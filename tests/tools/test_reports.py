"""`explain` on what people wrote: public threads, plain sentences, other languages, and what is not ours."""

from __future__ import annotations

import json

import pytest

from diffusers_quantfix.advisories import symptoms
from diffusers_quantfix.fixes.targets import declaration, declarations
from tests import asked

DECLARATIONS = declarations()
ROWS = asked.rows()
# kind -> the shares whose first answer, and one of whose first three, is right; of `foreign` those that name no fix.
# The texts taught the weights, so these shares say only that `asked.json` fits the code.  A foreign text is compared
# with the ten most similar ones, so that it is itself among them counts little.
ENOUGH = {"error": (1, 1), "title": (1, 1), "sentence": (1, 1), "foreign": (0.94, 0.94)}
# The same where the text's own thread taught nothing.  Those of `reports_later.txt` are harder than the others:
# without them it is 0.83 and 0.91 of the errors, 0.71 and 0.74 of the titles, 0.8 and 0.81 of the sentences, and 0.87
# of the foreign ones.
UNSEEN = {"error": (0.81, 0.9), "title": (0.68, 0.73), "sentence": (0.75, 0.77), "foreign": (0.83, 0.83)}


def answers(text: str) -> list[str]:
    """The fixes that `explain` names, whatever is installed here."""
    return [match.fix.id for match in symptoms.search(text, DECLARATIONS, lambda name: None)]


def too_low(answered: list[tuple[asked.Row, list[str]]], enough: dict[str, tuple[float, float]]) -> list[str]:
    found = asked.rates(answered)
    return [
        f"{kind}: first {first}, among three {three} of {count}"
        for kind, shares in enough.items()
        for first, three, count in (found["all", kind],)
        if first < shares[0] * count or three < shares[1] * count
    ]


def test_the_reports_are_many_and_each_stands_once():
    assert len(ROWS) >= 530 and {row.kind for row in ROWS} == set(ENOUGH)
    assert len({row.text for row in ROWS}) == len(ROWS)
    assert all(bool(row.bugs) != (row.kind == "foreign") for row in ROWS)


def test_what_was_learned_is_of_these_texts():
    """Fails after a text was added or the vocabulary changed: `python -m tests.asked --write`."""
    data = json.loads(asked.FILE.read_text(encoding="utf-8"))
    now = [[" ".join(names), " ".join(sorted(found))] for names, found in asked.asked([*ROWS, *asked.ours()])]
    assert data["texts"] == now


def test_enough_are_answered():
    assert not too_low([(row, answers(row.text)) for row in ROWS], ENOUGH)


@pytest.mark.long
def test_enough_are_answered_that_taught_nothing():
    texts = [*ROWS, *asked.ours()]
    assert not too_low(asked.answered(texts, asked.numbers(texts)), UNSEEN)


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
