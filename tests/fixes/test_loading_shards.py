"""What is apart in a checkpoint in several files, and the contents of one of them made whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diffusers_quantfix.loading import shards
from tests.gate import unmet
from tests.time_limit import TimeIsUp, time_limit

pytest.importorskip("safetensors")

CONTENTS = {
    "a": ("x.weight", "x.weight.absmax", "y.weight", "z.weight", "w.weight"),
    "b": ("x.weight.quant_state.bitsandbytes__nf4", "y.SCB", "y.weight_format", "z.bias", "other.absmax"),
}


@pytest.fixture
def files(tmp_path):
    import torch
    from safetensors.torch import save_file

    paths = [str(tmp_path / f"{name}.safetensors") for name in CONTENTS]
    for path, keys in zip(paths, CONTENTS.values(), strict=True):
        save_file({key: torch.ones(1) for key in keys}, path)
    return paths


@pytest.fixture
def pickles(tmp_path):
    """The same in files of ``torch.save``."""
    import torch

    paths = [str(tmp_path / f"{name}.bin") for name in CONTENTS]
    for path, keys in zip(paths, CONTENTS.values(), strict=True):
        torch.save({key: torch.ones(1) for key in keys}, path)
    return paths


def quantizer(method="bitsandbytes", pre_quantized=True):
    return SimpleNamespace(
        quantization_config=SimpleNamespace(quant_method=method), pre_quantized=pre_quantized
    )


def test_which_keys_are_apart(files):
    import torch

    apart = shards.companions_apart(files)
    assert apart == {
        "x.weight": {"x.weight.quant_state.bitsandbytes__nf4": files[1]},
        "y.weight": {"y.SCB": files[1], "y.weight_format": files[1]},
    }
    first, second = ({key: torch.zeros(1) for key in keys} for keys in CONTENTS.values())
    assert set(shards.rejoined(first, apart)) == {*CONTENTS["a"], *CONTENTS["b"][:3]}
    assert set(shards.rejoined(second, apart)) == {"z.bias", "other.absmax"}


def test_a_companion_in_two_files(files, tmp_path):
    """Nothing says which one is the weight's; the other weights are loaded."""
    import torch
    from safetensors.torch import save_file

    more = str(tmp_path / "more.safetensors")
    save_file({"x.weight.quant_state.bitsandbytes__nf4": torch.zeros(1)}, more)
    apart = shards.companions_apart([*files, files[0], more])
    assert apart == {"y.weight": {"y.SCB": files[1], "y.weight_format": files[1]}}


@pytest.mark.parametrize(
    "files", [None, [], ["one.safetensors"], [{}, {}], ["a.bin", "b.bin"], ["no", "where"]]
)
def test_what_is_left_alone(files):
    assert shards.companions_apart(files) == {}


def opened(module, name, monkeypatch) -> list[str]:
    """The files that this function of a library is called with from now on."""
    found, original = [], getattr(module, name)

    def call(file, *args, **kwargs):
        found.append(str(file))
        return original(file, *args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return found


@pytest.mark.parametrize("kind", ["files", "pickles"])
def test_each_file_is_opened_once(request, kind, monkeypatch):
    """Before: once for each companion, and a pickle is read as a whole each time."""
    import safetensors
    import torch

    paths = request.getfixturevalue(kind)
    if kind == "pickles" and (reason := unmet("torch>=2.6")):
        pytest.skip(reason)
    of = (safetensors, "safe_open") if kind == "files" else (torch, "load")
    found = opened(*of, monkeypatch)
    apart = shards.companions_apart(paths)
    assert found == paths
    found.clear()
    whole = shards.rejoined({key: torch.zeros(1) for key in CONTENTS["a"]}, apart)
    assert found == paths[1:]
    assert set(whole) == {*CONTENTS["a"], *CONTENTS["b"][:3]}
    assert all(whole[key] == 1 for key in CONTENTS["b"][:3])


def test_pickles_are_not_opened_before_torch_2_6(pickles, monkeypatch):
    """They can run code, even with ``weights_only=True``, and transformers refuses them."""
    import torch

    found = opened(torch, "load", monkeypatch)
    for version in ("2.5.1", "2.5.1+cu124", "2.6.0.dev20241001", "1.13.1"):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
            assert shards.look_ahead(quantizer(), pickles) == {}
    assert not found
    if not unmet("torch>=2.6"):
        assert set(shards.look_ahead(quantizer(), pickles)) == {"x.weight", "y.weight"}


def test_whose_files_are_looked_at(files):
    assert shards.look_ahead(quantizer(), files)
    assert shards.look_ahead(quantizer(SimpleNamespace(value="bitsandbytes")), files)
    for other in (None, quantizer("gptq"), quantizer(pre_quantized=False), SimpleNamespace()):
        assert shards.look_ahead(other, files) == {}


def test_a_file_that_cannot_be_read_is_not_our_error(files):
    with open(files[1], "wb") as file:
        file.write(b"no tensors")
    assert shards.look_ahead(quantizer(), files) == {}


def test_a_time_limit_of_the_program_is_heard(files, monkeypatch):
    """Before: what it raised counted as a file that cannot be read."""
    import safetensors

    with time_limit() as over, monkeypatch.context() as patch, pytest.raises(TimeIsUp):
        patch.setattr(safetensors, "safe_open", over)
        shards.look_ahead(quantizer(), files)
