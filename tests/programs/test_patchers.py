"""Other tools that patch when they are imported, before us and after us: real ones, on the real libraries."""

from __future__ import annotations

import pytest

from tests.gate import unmet
from tests.programs.harness import need, run
from tests.rig import models

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(unmet("bitsandbytes>=0.46")), reason="older bitsandbytes cannot quantize on the CPU"
    ),
]


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return models.saved(models.flux_transformer(), tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def alone(flux, tmp_path_factory):
    """What the program tells where no other tool patches."""
    told = run("beside", tmp_path_factory.mktemp("alone"), "nothing", "before", flux)
    assert not told["odd"] and len(told["was applied"]) > 20
    assert told["told"]["4 bits"] == told["told"]["4 bits, reloaded"] == told["told"]["4 bits, copied"]
    return told


# The fixes whose code is in Params4bit.to.
TO = {"bnb-cpu-packing", "bnb-params4bit-shared-state", "bnb-quant-state-meta"}
# What a wrapper over ours keeps alive after `revert`, and the board says so.
KEPT = {
    ("pasted_around", "after"): TO | {"bnb-linear4bit-conversion", "bnb-packed-cast"},
    ("unsloth", "after"): {"bnb-cpu-packing", "transformers-quantized-resave"},
}
TOOLS = {
    "libraries": (),
    "pasted_around": (),
    "gevent": ("gevent",),
    "ddtrace": ("ddtrace",),
    "opentelemetry": ("opentelemetry.instrumentation",),
    "unsloth": ("unsloth",),
}

# They put a forward pass of their own in the place of Linear4bit's, which does not pack the weight for CPUs with
# AVX512-BF16 as bitsandbytes does: there its output differs by rounding, with this package and without it.
OWN_FORWARD = {"unsloth"}

# Theirs has no such bug: the bias is converted for each run.
HEALTHY = {("unsloth", "before"): {"bnb-linear4bit-bias"}}

# All other tests import the libraries after us.
ORDERS = [
    (tool, order)
    for tool in TOOLS
    for order in ("before", "after")
    if (tool, order) != ("libraries", "after")
]


@pytest.mark.parametrize(("tool", "order"), ORDERS)
def test_nothing_breaks_and_undo_leaves_theirs(flux, alone, tmp_path, tool, order) -> None:
    need(*TOOLS[tool])
    told = run("beside", tmp_path, tool, order, flux, UNSLOTH_ALLOW_CPU="1")
    own = {name for name in told["told"] if tool in OWN_FORWARD and name.startswith("4 bits")}
    assert len({told["told"][name] for name in own}) <= 1
    assert told["told"].items() - alone["told"].items() <= {(name, told["told"][name]) for name in own}
    assert told["theirs"] and not told["odd"] and not told["still applied"]
    healthy = HEALTHY.get((tool, order), set()) & set(alone["was applied"])
    # What is not applied alone either does not concern this processor.
    assert set(told["healthy by others"]) & set(alone["was applied"]) == healthy
    assert told["was applied"] == [key for key in alone["was applied"] if key not in healthy]
    kept = KEPT.get((tool, order), set())
    assert set(told["cannot be undone"]) == kept & set(told["was applied"])


@pytest.mark.parametrize(
    ("launcher", "module"),
    [
        (("ddtrace-run",), "ddtrace"),
        (
            ("opentelemetry-instrument", "--traces_exporter", "none", "--metrics_exporter", "none",
             "--logs_exporter", "none"),
            "opentelemetry.instrumentation",
        ),
    ],
    ids=["ddtrace-run", "opentelemetry-instrument"],
)  # fmt: skip
def test_a_launcher_that_instruments_the_process(flux, alone, tmp_path, launcher, module) -> None:
    need(module)
    told = run("beside", tmp_path, "nothing", "before", flux, launcher=launcher)
    assert told == alone


def test_a_pasted_method_before_us_is_kept(flux, alone, tmp_path) -> None:
    told = run("beside", tmp_path, "pasted_whole", "before", flux)
    assert told["theirs"] and not told["still applied"]
    assert told["told"] == alone["told"]


def test_a_pasted_method_after_us_is_named_on_the_board(flux, alone, tmp_path) -> None:
    told = run("beside", tmp_path, "pasted_whole", "after", flux)
    assert set(told["odd"]) == TO & set(alone["was applied"])
    assert all("Params4bit.to now holds code of __main__" in reason for reason in told["odd"].values())
    assert told["theirs"] and not told["still applied"]
    assert told["told"] == alone["told"]
