"""transformers-tie-threads, transformers-dtype-threads, transformers-load-threads, diffusers-load-threads: models are
loaded in several threads at once."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from diffusers_quantfix.loading import turns
from diffusers_quantfix.verify.models.threads import (
    kept,
    overlapping,
    overlapping_calls,
    while_a_model_is_made,
)
from tests.gate import unmet

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

TIE, DTYPE, LOAD = "transformers-tie-threads", "transformers-dtype-threads", "transformers-load-threads"
DIFFUSERS = "diffusers-load-threads"
OF_INIT = ("uniform_", "constant_", "kaiming_uniform_", "normal_")
SHOWS = "the default dtype is torch.(b?float16|float64)"


@pytest.fixture(autouse=True)
def usual_torch():
    from transformers.modeling_utils import PreTrainedModel

    places = [(torch.nn.Module, "register_parameter"), (PreTrainedModel, "tie_weights"), (torch, "linspace")]
    modules = ("init", "modules.linear", "modules.conv", "modules.normalization", "modules.activation")
    for path in modules:
        module = importlib.import_module(f"torch.nn.{path}")
        places += [(module, name) for name in OF_INIT if name in vars(module)]
    with kept(*places):
        yield


def assert_dtype(expected=torch.float32) -> None:
    assert torch.get_default_dtype() == expected, f"the default dtype is {torch.get_default_dtype()}"


def t5(folder) -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)


def clip(folder):
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
    CLIPTextModel(config).save_pretrained(folder)
    return CLIPTextModel


def vae(folder):
    from diffusers import AutoencoderKL

    AutoencoderKL(block_out_channels=(4,), norm_num_groups=1).save_pretrained(folder)
    return AutoencoderKL


def assert_tied(folder, when: str) -> None:
    from transformers import T5EncoderModel

    model = T5EncoderModel.from_pretrained(folder)
    shared = model.encoder.embed_tokens.weight
    assert not shared.is_meta, f"a weight is on meta {when}"
    assert shared.data_ptr() == model.shared.weight.data_ptr(), f"the weights are not shared {when}"


def context(path: str):
    """A context manager, as "library.module.name"; skipped where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"there is no {path} here")


def of_initialization(name: str):
    return context(f"transformers.initialization.{name}")


@pytest.mark.defect(TIE, shows="a weight is on meta|the weights are not shared")
def test_an_encoder_is_loaded_while_another_thread_makes_a_model(tmp_path):
    t5(tmp_path)
    overlapping(of_initialization("no_tie_weights"), lambda: assert_tied(tmp_path, "meanwhile"))


@pytest.mark.defect(TIE, shows="a weight is on meta|the weights are not shared")
def test_an_encoder_is_loaded_after_two_threads_made_models(tmp_path):
    from transformers.modeling_utils import PreTrainedModel

    t5(tmp_path)
    before = PreTrainedModel.tie_weights
    overlapping(of_initialization("no_tie_weights"))
    assert_tied(tmp_path, "afterwards")
    assert PreTrainedModel.tie_weights is before


@pytest.mark.defect(TIE, shows="torch.linspace is changed", needs="transformers>=5.10")
def test_linspace():
    before = torch.linspace
    overlapping(of_initialization("meta_device_safe_creation_ops"))
    assert torch.linspace is before, "torch.linspace is changed"


@pytest.mark.defect(TIE, shows="a loaded weight is not initialised")
def test_functions_of_torch_after_two_threads():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight._is_hf_initialized = True
    overlapping(of_initialization("guard_torch_init_functions"))
    torch.nn.init.constant_(weight, 1.0)
    assert weight.item() == 1.0, "a loaded weight is not initialised"


def test_the_thread_itself_ties_nothing(tmp_path):
    no_tie_weights = of_initialization("no_tie_weights")
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with no_tie_weights():
        model = T5EncoderModel(config)
        assert model.encoder.embed_tokens.weight is not model.shared.weight


def test_the_thread_itself_keeps_loaded_weights():
    with of_initialization("guard_torch_init_functions")():
        weight = torch.nn.Parameter(torch.zeros(1))
        weight._is_hf_initialized = True
        assert torch.nn.init.constant_(weight, 1.0).item() == 0.0


@pytest.mark.defect(DTYPE, shows=SHOWS)
def test_the_default_dtype_of_transformers_5():
    local_torch_dtype = context("transformers.modeling_utils.local_torch_dtype")
    overlapping(lambda: local_torch_dtype(torch.float16))
    assert_dtype()


def loading(model_class, folder, dtype=torch.float16):
    """For `overlapping_calls`: a model is loaded, and the middle is right before it is made."""

    def load(middle) -> None:
        if hasattr(model_class, "from_config"):  # of diffusers

            class Model(model_class):
                @classmethod
                def from_config(cls, *args, **kwargs):
                    middle()
                    return super().from_config(*args, **kwargs)

        else:

            class Model(model_class):
                def __init__(self, config):
                    middle()
                    super().__init__(config)

        Model.from_pretrained(folder, torch_dtype=dtype)

    return load


@pytest.mark.defect(LOAD, shows=SHOWS)
def test_two_threads_load_text_encoders(tmp_path):
    if reason := unmet("transformers<5"):  # there it is `DTYPE`
        pytest.skip(reason)
    overlapping_calls(loading(clip(tmp_path), tmp_path))
    assert_dtype()


@pytest.mark.defect(DIFFUSERS, shows=SHOWS)
def test_two_threads_load_models(tmp_path):
    overlapping_calls(loading(vae(tmp_path), tmp_path))
    assert_dtype()


def change_config(folder, **values) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))


@pytest.mark.defect(DIFFUSERS, shows=SHOWS)
def test_a_model_that_cannot_be_made(tmp_path):
    model = vae(tmp_path)
    change_config(tmp_path, down_block_types=["unknown"])
    with pytest.raises(ValueError, match="unknown"):
        model.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_dtype()


@pytest.mark.defect(LOAD, shows=SHOWS, needs="transformers<4.49")
def test_an_encoder_that_cannot_be_made(tmp_path):
    model = clip(tmp_path)
    change_config(tmp_path, hidden_act="unknown")
    with pytest.raises(KeyError, match="unknown"):
        model.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_dtype()


@pytest.mark.defect(DIFFUSERS, shows="has no initial weights")
def test_a_layer_of_another_thread_has_initial_weights():
    no_init_weights = context("diffusers.models.modeling_utils.no_init_weights")

    def initial() -> float:
        weight = torch.zeros(1)
        torch.nn.init.constant_(weight, 1.0)
        return weight.item()

    before = torch.nn.init.constant_
    one = overlapping(no_init_weights, initial)
    assert one == 1.0, "a layer of another thread has no initial weights"
    with no_init_weights():
        assert initial() == 0.0
    assert initial() == 1.0 and torch.nn.init.constant_ is before


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [vae, clip])
def test_loads_one_after_the_other(tmp_path, make, dtype):
    """Every load is as before: within it, the default dtype is the one that was asked for."""
    model, seen = make(tmp_path), []
    loading(model, tmp_path, dtype)(lambda: seen.append(torch.get_default_dtype()))
    assert_dtype()
    if dtype is not None and not unmet("diffusers>=0.33"):
        assert seen == [dtype]
    torch.set_default_dtype(torch.float64)
    loading(model, tmp_path, dtype)(lambda: None)
    assert_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


def test_a_model_that_loads_another_one(tmp_path):
    model, dtypes = vae(tmp_path), []

    class Outer(model):
        @classmethod
        def from_config(cls, *args, **kwargs):
            model.from_pretrained(tmp_path, torch_dtype=torch.float64)
            dtypes.append(torch.get_default_dtype())
            return super().from_config(*args, **kwargs)

    Outer.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_dtype()
    assert dtypes in ([torch.bfloat16], [torch.float32]), dtypes


@pytest.mark.parametrize("checked", [True, False])
def test_a_part_with_its_own_from_pretrained(tmp_path, checked):
    """A copy of upstream's code, used while another model is made."""
    model = vae(tmp_path)
    if not hasattr(model, "_set_default_torch_dtype"):
        pytest.skip("this diffusers has no such method")
    dtypes = []

    class Outer(model):
        @classmethod
        def from_config(cls, *args, **kwargs):
            dtypes.append(torch.get_default_dtype())
            before = cls._set_default_torch_dtype(torch.float64)
            dtypes.append(torch.get_default_dtype())
            if not checked or before is not None:
                torch.set_default_dtype(before)
            dtypes.append(torch.get_default_dtype())
            return super().from_config(*args, **kwargs)

    Outer.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_dtype()
    assert dtypes == [torch.bfloat16, torch.float64, torch.bfloat16]


def test_a_subclass_that_restores_what_was_set(tmp_path):
    model = vae(tmp_path)
    if not hasattr(model, "_set_default_torch_dtype"):
        pytest.skip("this diffusers has no such method")
    found = []

    class Restoring(model):
        @classmethod
        def _set_default_torch_dtype(cls, dtype):
            found.append(super()._set_default_torch_dtype(dtype))
            torch.set_default_dtype(found[-1])
            return found[-1]

    Restoring.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_dtype()
    assert found == [torch.float32]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_part_that_is_made_before_the_model(tmp_path, dtype):
    """By a copy of upstream's code."""
    model = vae(tmp_path)
    if not hasattr(model, "_set_default_torch_dtype"):
        pytest.skip("this diffusers has no such method")

    class Outer(model):
        @classmethod
        def load_config(cls, *args, **kwargs):
            before = cls._set_default_torch_dtype(torch.float16)
            if before is not None:
                torch.set_default_dtype(before)
            return super().load_config(*args, **kwargs)

    made = Outer.from_pretrained(tmp_path, torch_dtype=dtype)
    assert_dtype()
    assert made.dtype == (dtype or torch.float32)


def test_a_text_encoder_with_its_own_from_config(tmp_path):
    from transformers import CLIPTextModel

    name = next(
        (name for name in ("_set_default_dtype", "_set_default_torch_dtype") if hasattr(CLIPTextModel, name)),
        None,
    )
    if name is None:
        pytest.skip("this transformers has no such method")
    dtypes = []

    class Part(clip(tmp_path)):
        @classmethod
        def _from_config(cls, config, **kwargs):
            before = getattr(cls, name)(torch.float64)
            made = cls(config)
            torch.set_default_dtype(before)
            return made

    class Outer(CLIPTextModel):
        def __init__(self, config):
            Part._from_config(config)
            dtypes.append(torch.get_default_dtype())
            CLIPTextModel._from_config(config, torch_dtype=torch.float16)
            dtypes.append(torch.get_default_dtype())
            super().__init__(config)

    Outer.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_dtype()
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("sets_it", ["__init__", "_load_pretrained_model"])
def test_a_text_encoder_that_sets_the_default_dtype(tmp_path, dtype, sets_it):
    """From 4.49 to 4.57 upstream restores it after a load, whoever has changed it."""
    if unmet("transformers>=4.49") or not unmet("transformers>=5"):
        pytest.skip("this transformers leaves what the model has set")

    class Setting(clip(tmp_path)):
        def __init__(self, config):
            super().__init__(config)
            if sets_it == "__init__":
                torch.set_default_dtype(torch.float64)

        @classmethod
        def _load_pretrained_model(cls, *args, **kwargs):
            if sets_it == "_load_pretrained_model":
                torch.set_default_dtype(torch.float64)
            return super()._load_pretrained_model(*args, **kwargs)

    Setting.from_pretrained(tmp_path, torch_dtype=dtype)
    assert_dtype()


def test_a_program_with_its_own_from_pretrained():
    from diffusers import AutoencoderKL

    if not hasattr(AutoencoderKL, "_set_default_torch_dtype"):
        pytest.skip("this diffusers has no such method")
    before = AutoencoderKL._set_default_torch_dtype(torch.bfloat16)
    assert before == torch.float32
    assert_dtype(torch.bfloat16)
    torch.set_default_dtype(before)


def test_many_threads(tmp_path):
    """Every model is what it is when it is loaded alone, and nothing stays changed."""
    folders = {make: tmp_path / make.__name__ for make in (vae, clip)}
    models = {make: make(folder) for make, folder in folders.items()}
    dtypes = (torch.float32, torch.bfloat16, torch.float16, None)

    def loaded(make, dtype):
        model = models[make].from_pretrained(folders[make], torch_dtype=dtype)
        tensors = (*model.named_parameters(), *model.named_buffers())
        return [(name, tensor.dtype, tensor.device.type) for name, tensor in tensors]

    jobs = [(make, dtype) for make in folders for dtype in dtypes]
    expected, found = [loaded(*job) for job in jobs], {}

    def load(index: int) -> None:
        for _ in range(3):
            found[index] = loaded(*jobs[index])

    threads = [threading.Thread(target=load, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(index) for index in range(len(jobs))] == expected
    assert_dtype()


IMPORTED_FIRST = """
import threading, torch
from transformers import T5Config, T5EncoderModel
from transformers import initialization
import diffusers_quantfix

names = list(initialization.TORCH_INIT_FUNCTIONS)
usual = [getattr(torch.nn.init, name) for name in names]
within, both, left = threading.Event(), threading.Event(), threading.Event()

class Model(T5EncoderModel):
    def smart_apply(self, *args):
        self.middle()

config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
one, other = T5EncoderModel(config), T5EncoderModel(config)
one.__class__ = other.__class__ = Model
one.middle = lambda: (within.set(), both.wait(1))
other.middle = lambda: (both.set(), left.wait(1))
thread = threading.Thread(target=lambda: (one.initialize_weights(), left.set()))
thread.start()
within.wait(60)
other.initialize_weights()
thread.join()
print([getattr(torch.nn.init, name) for name in names] == usual)
"""


@pytest.mark.long
def test_the_libraries_were_imported_first():
    of_initialization("no_tie_weights")
    command = [sys.executable, "-c", IMPORTED_FIRST]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split() == ["True"], ended.stderr[-2000:]


FIRST_LOAD = """
import sys, torch
from transformers import T5Config, T5EncoderModel
if sys.argv[1] == "patched":
    import diffusers_quantfix

config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
T5EncoderModel(config).save_pretrained(sys.argv[2])
T5EncoderModel.from_pretrained(sys.argv[2])
with torch.device("meta"):
    print(torch.linspace(0, 1, 2).device)
"""


@pytest.mark.long
@pytest.mark.defect(TIE, shows="torch.linspace is on cpu", needs="transformers>=5.10")
def test_linspace_after_the_first_load(side, tmp_path):
    context("transformers.initialization.meta_device_safe_creation_ops")
    command = [sys.executable, "-c", FIRST_LOAD, side, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split() == ["meta"], f"torch.linspace is on {ended.stdout}\n{ended.stderr[-2000:]}"


def test_a_thread_that_ends_in_its_turn(monkeypatch):
    """Others wait once for it, and then not any longer."""
    monkeypatch.setattr(turns, "_PATIENCE", 0.2)
    entered = turns.turn()
    thread = threading.Thread(target=entered.__enter__)
    thread.start()
    thread.join()
    started = time.monotonic()
    with turns.turn():
        pass
    assert time.monotonic() - started >= 0.2
    monkeypatch.setattr(turns, "_PATIENCE", 60.0)
    started = time.monotonic()
    with turns.turn(), turns.turn():
        pass
    assert time.monotonic() - started < 30
    entered.__exit__(None, None, None)


def test_threads_that_do_not_wait_any_longer_take_turns(monkeypatch):
    monkeypatch.setattr(turns, "_PATIENCE", 0.2)
    entered = turns.turn()
    thread = threading.Thread(target=entered.__enter__)
    thread.start()
    thread.join()
    within, most = [], []

    def work(_) -> None:
        with turns.turn():
            within.append(None)
            most.append(len(within))
            time.sleep(0.02)
            within.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == [1] * 4
    entered.__exit__(None, None, None)


@pytest.mark.parametrize("make", [vae, clip])
def test_a_load_that_another_one_did_not_wait_for_ends_first(tmp_path, monkeypatch, side, make):
    """The second one finds the dtype of the first, and does not restore that."""
    if side == "bare":
        pytest.skip("no load waits")
    monkeypatch.setattr(turns, "_PATIENCE", 0.2)
    model, begun, ended, found = make(tmp_path), threading.Event(), threading.Event(), []

    def first() -> None:
        loading(model, tmp_path, torch.bfloat16)(lambda: (begun.set(), ended.wait(2)))

    def second() -> None:
        def middle() -> None:
            ended.set()
            thread.join(60)
            found.append(torch.get_default_dtype())

        loading(model, tmp_path, torch.float16)(middle)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(60)
    second()
    assert_dtype()
    assert not turns._changes
    if found != [torch.float32]:  # what the first has restored
        assert unmet("diffusers>=0.33")  # which sets no dtype


SINGLE_FILE = "diffusers-single-file-threads"


@pytest.mark.defect(SINGLE_FILE, shows=r"the model is in torch.bfloat16", needs="diffusers>=0.33")
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_a_single_file_while_another_thread_makes_a_model(tmp_path, side, dtype):
    from tests.fixes.test_diffusers_single_file_device import video_transformer
    from tests.rig import models

    if sentence := unmet("diffusers>=0.32"):
        pytest.skip(sentence)
    if side == "bare" and dtype is not None:
        pytest.skip("its weights are loaded in that dtype")
    folder = models.saved(video_transformer(), tmp_path / "model")
    kind = type(video_transformer())

    def load(is_made):
        class Model(kind):
            @classmethod
            def from_config(cls, *args, **kwargs):
                made = super().from_config(*args, **kwargs)
                is_made()
                return made

        file = folder / "diffusion_pytorch_model.safetensors"
        return Model.from_single_file(str(file), config=str(folder), torch_dtype=dtype)

    model = while_a_model_is_made(str(tmp_path / "other"), load)
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.dtype == torch.float32, f"the model is in {tensor.dtype}"
    assert_dtype()


@pytest.mark.defect(SINGLE_FILE, shows=r"the model is in torch.bfloat16", needs="diffusers>=0.33")
def test_a_text_encoder_of_a_single_file(tmp_path):
    """It is made in the same way; upstream finds no checkpoint for one this small."""
    single_file_utils = importlib.import_module("diffusers.loaders.single_file_utils")
    if not hasattr(single_file_utils, "init_empty_weights") or unmet("diffusers>=0.33"):
        pytest.skip("this diffusers loads the weights in float32")
    importlib.import_module("diffusers.loaders.single_file_model")

    def load(is_made):
        with single_file_utils.init_empty_weights():
            made = torch.nn.Linear(1, 1)
            is_made()
        return made

    model = while_a_model_is_made(str(tmp_path / "other"), load)
    assert model.weight.is_meta
    assert model.weight.dtype == torch.float32, f"the model is in {model.weight.dtype}"


def test_a_pool_that_loads_while_its_caller_skips_weights(tmp_path):
    """It waits for nobody."""
    no_init_weights = context("diffusers.models.modeling_utils.no_init_weights")
    model, started = vae(tmp_path), time.monotonic()
    with no_init_weights(), ThreadPoolExecutor(1) as pool:
        pool.submit(model.from_pretrained, tmp_path, torch_dtype=torch.float16).result(timeout=120)
    assert time.monotonic() - started < 20
    assert_dtype()
