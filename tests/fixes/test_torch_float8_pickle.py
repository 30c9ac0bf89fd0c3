"""torch-float8-pickle: float8 weights that were pickled cannot be read."""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
import types

import pytest

from diffusers_quantfix.verify.models import flux
from tests.fixes import quanto_models as q
from tests.fixes import torchao_models as ao
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers.models.modeling_utils")  # torch alone does not activate the package

FIX_ID = "torch-float8-pickle"
SHOWS = "'torch.storage.UntypedStorage' has no attribute 'dtype'"
DTYPES = ("float8_e4m3fn", "float8_e5m2")


def values(dtype: str = "float8_e4m3fn"):
    return torch.linspace(-2, 2, 24).view(4, 6).to(getattr(torch, dtype))


def assert_equal(one, other) -> None:
    assert (one.dtype, one.device, one.stride()) == (other.dtype, other.device, other.stride())
    assert torch.equal(one.to(torch.float32), other.to(torch.float32))


def in_the_old_format(thing) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    return file


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_pickle(dtype, protocol):
    tensor = values(dtype)
    read = pickle.loads(pickle.dumps(tensor, protocol))
    assert_equal(read, tensor)
    assert_equal(pickle.loads(pickle.dumps(read, protocol)), tensor)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_view_and_a_parameter():
    for tensor in (values()[1:, ::2], torch.nn.Parameter(values(), requires_grad=False)):
        read = pickle.loads(pickle.dumps(tensor))
        assert type(read) is type(tensor)
        assert_equal(read, tensor)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_file_in_the_old_format(tmp_path):
    tensors = {"one": values(), "plain": torch.ones(3), "view": values()[1:]}
    (tmp_path / "old.pt").write_bytes(in_the_old_format(tensors).getvalue())
    for read in (
        torch.load(tmp_path / "old.pt", weights_only=False),
        torch.load(in_the_old_format(tensors), weights_only=False),
        torch.load(
            in_the_old_format(tensors), weights_only=False, map_location=lambda storage, place: storage
        ),
        torch.load(in_the_old_format(tensors), weights_only=False, pickle_module=another_pickle()),
    ):
        for name, tensor in tensors.items():
            assert_equal(read[name], tensor)


def another_pickle():
    """A module of its own with what torch asks of one; unlike a module it has no hash."""

    class Unpickler(pickle._Unpickler):
        """The one in Python."""

    return types.SimpleNamespace(
        __name__="own", Unpickler=Unpickler, load=lambda file, **_: Unpickler(file).load()
    )


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_the_state_dict_of_a_model_under_layerwise_casting():
    if sentence := unmet("diffusers>=0.33"):
        pytest.skip(f"layerwise casting came then; {sentence}")
    model = flux.transformer()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with torch.no_grad():
        expected = model(**flux.inputs()).sample
    read = pickle.loads(pickle.dumps(model.state_dict()))
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in read.values())
    twin = flux.transformer(seed=1)
    twin.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    twin.load_state_dict(read)
    with torch.no_grad():
        assert torch.equal(twin(**flux.inputs()).sample, expected)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_model_with_float8_weights_of_quanto():
    model = q.layers("qfloat8", torch.float32)
    read = pickle.loads(pickle.dumps(model))
    for _ in range(2):
        assert torch.equal(q.run(read, torch.float32), q.run(model, torch.float32))
        read = pickle.loads(pickle.dumps(read))


def test_a_model_with_float8_weights_of_torchao():
    """Without the package ``torchao-module-pickle`` shows before."""
    model = ao.layers("float8")
    assert torch.equal(ao.run(pickle.loads(pickle.dumps(model))), ao.run(model))


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_a_storage_itself_is_read_as_from_the_present_format():
    storage = torch.arange(4, dtype=torch.float32).untyped_storage()
    present = io.BytesIO()
    torch.save(storage, present)
    present.seek(0)
    expected = torch.load(present, weights_only=False)
    read = pickle.loads(pickle.dumps(storage))
    assert type(read) is type(expected)
    assert read.tolist() == expected.tolist()


def test_other_tensors_are_read_as_before():
    shared = torch.arange(6.0)
    things = {"one": shared, "view": shared[2:], "half": shared.half(), "text": "x"}
    read = torch.load(in_the_old_format(things), weights_only=True)
    assert read["one"].data_ptr() + 8 == read["view"].data_ptr(), "they still share their memory"
    again = torch.load(in_the_old_format(things), weights_only=False)
    for name in ("one", "view", "half"):
        assert_equal(again[name], things[name])
        assert_equal(pickle.loads(pickle.dumps(things[name])), things[name])


def test_a_tar_archive_is_refused_as_before(tmp_path):
    """It may hold code."""
    if sentence := unmet("torch>=2.6"):
        pytest.skip(f"torch did not refuse it before; {sentence}")
    with tarfile.open(tmp_path / "model.tar", mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(RuntimeError, match=r"legacy \.tar format"):
        torch.load(tmp_path / "model.tar", weights_only=True)


@pytest.mark.defect(FIX_ID, shows=SHOWS)
def test_interrupted():
    """In the midst of reading; the same bytes can be read afterwards."""
    stored = pickle.dumps({"one": values(), "two": values("float8_e5m2")})

    class Stop(BaseException):
        pass

    def stop(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "persistent_load":
            raise Stop

    before = sys.gettrace()
    sys.settrace(stop)
    try:
        with pytest.raises(Stop):
            pickle.loads(stored)
    finally:
        sys.settrace(before)
    assert_equal(pickle.loads(stored)["two"], values("float8_e5m2"))
