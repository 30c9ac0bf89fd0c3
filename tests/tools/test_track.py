"""`track`: the samples are the truth, and nothing stays behind."""

from __future__ import annotations

import gc
import json
import weakref

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory import watching
from tests.rig import models
from tests.tools.pipelines import flux


@pytest.mark.parametrize("bits", [4, 8])
def test_a_run_and_a_move(gpu, tmp_path, bits):
    device = str(gpu.devices[0])
    pipeline = flux(tmp_path, bits, text=True, device=gpu.devices[0])
    held = gpu.allocated(device)
    with qf.track(pipeline, interval=0) as memory:
        models.prompt_flux(pipeline, steps=2)
        pipeline.vae.decode(models_latents(pipeline))
        pipeline.text_encoder.to("cpu")
        memory.mark("text encoder away")
    labels = [sample.label for sample in memory.samples]
    assert labels[0] == "start"
    assert labels[-2:] == ["text encoder away", "end"]
    assert labels.count("transformer begins") == labels.count("transformer ends") == 2
    assert "vae begins" in labels
    assert memory.samples[0].allocated[device] == held
    assert memory.samples[0].components["transformer"][device] == qf.audit(pipeline.transformer).bytes[device]
    assert device not in memory.samples[-1].components["text_encoder"]
    assert memory.peak[device] > held
    assert all(sample.peak[device] >= sample.allocated[device] for sample in memory.samples)


def models_latents(pipeline):
    import torch

    return torch.zeros(1, 16, 4, 4, device=pipeline.vae.device, dtype=pipeline.vae.dtype)


def test_a_failing_call_ends_the_track_cleanly(gpu):
    pipeline = models.flux_pipeline().to(gpu.devices[0])
    with pytest.raises(TypeError), qf.track(pipeline) as memory:
        pipeline.transformer("nonsense")
    assert memory.samples[-1].label in ("TypeError", "AttributeError")
    assert "transformer ends" in [sample.label for sample in memory.samples]
    assert not pipeline.transformer._forward_hooks
    assert not pipeline.transformer._forward_pre_hooks


def test_it_keeps_no_model_alive(gpu):
    pipeline = models.flux_pipeline().to(gpu.devices[0])
    with qf.track(pipeline) as memory:
        models.call_flux(pipeline, dtype=pipeline.transformer.dtype)
    gone = weakref.ref(pipeline.transformer)
    del pipeline
    gc.collect()
    assert gone() is None
    assert memory.samples


def test_releasing_inside_a_track(gpu):
    pipeline = models.flux_pipeline().to(gpu.devices[0])
    with qf.track(pipeline) as memory:
        qf.release(pipeline)
        memory.mark("released")
    device = str(gpu.devices[0])
    assert memory.samples[0].allocated[device] > memory.samples[-1].allocated[device]
    assert memory.samples[-1].components["transformer"].get(device, 0) == 0


def test_the_table_fits_a_terminal_and_the_dict_is_json(gpu, tmp_path):
    pipeline = flux(tmp_path, 8)
    with qf.track(pipeline, interval=0) as memory:
        models.call_flux(pipeline, steps=12)
    table = memory.table()
    assert max(map(len, table.splitlines())) <= 80
    assert "more samples" in table
    assert "peak: " in table
    assert json.loads(json.dumps(memory.to_dict()))["peak"] == memory.peak


def test_on_the_cpu_the_sums_of_audit_are_used():
    model = models.t5_encoder()
    with qf.track(model) as memory:
        pass
    assert memory.peak == qf.audit(model).bytes
    assert "cpu" in memory.table()


def test_the_picture(gpu, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    pipeline = models.flux_pipeline().to(gpu.devices[0])
    with qf.track(pipeline) as memory:
        models.call_flux(pipeline, dtype=pipeline.transformer.dtype, steps=20)
    memory.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    memory.plot(str(tmp_path / "memory.svg"))
    assert "transformer" in (tmp_path / "memory.svg").read_text()


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with qf.track(models.clip_text()) as memory:
        pass
    with pytest.raises(ImportError, match=r"pip install 'diffusers-quantfix\[plot\]'"):
        memory.plot(tmp_path / "memory.png")


@pytest.mark.parametrize(("target", "what"), [(3, "type int"), (None, "type NoneType")])
def test_what_is_no_model_is_said_in_one_sentence(target, what):
    with pytest.raises(TypeError, match=what):
        qf.track(target)


def test_nothing_to_track():
    with qf.track({"vae": None}) as memory:
        pass
    assert memory.peak == {}
    assert "no memory" in memory.table()


def test_a_file_and_a_copy_that_are_made_inside_have_no_hooks_of_ours(tmp_path):
    """Before: the pickle raised, and a copy recorded, too."""
    import copy
    import subprocess
    import sys

    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with qf.track(model, interval=0) as memory:
        model(torch.ones(1, 4))
        torch.save(model, tmp_path / "model.pt")
        other = copy.deepcopy(model)
        count = len(memory.samples)
        assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
        assert len(memory.samples) == count + 2
        torch.save(other, tmp_path / "other.pt")
    code = (
        "import sys, torch; sys.modules['diffusers_quantfix'] = None\n"
        "for name in sys.argv[1:]:\n"
        "    model = torch.load(name, weights_only=False)\n"
        "    model(torch.ones(1, 4)); torch.save(model, name)\n"
    )
    files = [str(tmp_path / "model.pt"), str(tmp_path / "other.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=120)


def test_a_part_of_torchscript_is_counted_and_not_watched():
    """Before: RuntimeError "register_forward_hook is not supported on ScriptModules", and three hooks stayed."""
    import torch

    model = torch.nn.ModuleDict(
        {"plain": torch.nn.Linear(4, 4), "script": torch.jit.script(torch.nn.Linear(4, 4))}
    )
    with qf.track({"all": model, "script": model["script"]}) as memory:
        model["script"](model["plain"](torch.ones(1, 4)))
    assert memory.samples[-1].components["all"] == {"cpu": 160}
    for module in (model, model["plain"]):
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_component_that_refuses_hooks_leaves_none_on_the_others():
    import torch

    class Refuses(torch.nn.Linear):
        def register_forward_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks")

    parts = {"first": torch.nn.Linear(4, 4), "second": Refuses(4, 4)}
    with pytest.raises(RuntimeError, match="no hooks"), qf.track(parts):
        pass
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts.values())


@pytest.mark.parametrize("within", ["function", "model"])
def test_a_model_that_is_compiled_inside_of_something(within):
    """Before: Unsupported, or three graphs instead of one, which did not go back after the block."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    parent = torch.nn.Sequential(model, torch.nn.ReLU())
    run = parent if within == "model" else lambda x: model(x) + 1
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    expected = run(torch.ones(2, 4))
    with qf.track(model, interval=0):
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(2, 4)), expected)
    assert len(graphs) == 1
    for _ in range(2):  # torch asks how many hooks there are
        assert torch.equal(compiled(torch.ones(2, 4)), expected)
    assert len(graphs) <= 2


def test_a_model_that_is_scripted_inside_of_the_block():
    import torch

    model = torch.nn.Linear(4, 4)
    with qf.track(model), pytest.raises(AttributeError, match=r"inside of track\(\): do it before"):
        torch.jit.script(model)
    assert torch.jit.script(model)(torch.ones(1, 4)).shape == (1, 4)


def test_calls_that_overlap_in_several_threads_are_one():
    """From the first that begins to the last that ends."""
    import threading

    import torch

    began, goes_on = threading.Barrier(2), [threading.Event() for _ in range(3)]

    class Waits(torch.nn.Module):
        def forward(self, x, number):
            began.wait(20)
            assert goes_on[number].wait(20)
            return x

    model, x = Waits(), torch.ones(1)
    with qf.track(model, interval=0) as run:
        calls = [threading.Thread(target=model, args=(x, number)) for number in range(3)]
        for number in range(3):
            calls[number].start()
            began.wait(20)
            if number:  # the one before ends within this one
                goes_on[number - 1].set()
                calls[number - 1].join(20)
        goes_on[2].set()
        calls[2].join(20)
    assert [sample.label for sample in run.samples] == ["start", "Waits begins", "Waits ends", "end"]


def test_one_thread_at_a_time_takes_a_sample(monkeypatch):
    """Before: two threads counted the bytes of a component in the same lists. Samples had other bytes, and the
    program's call raised an IndexError."""
    import threading
    import time

    import torch

    from diffusers_quantfix.placement.component_bytes import ComponentBytes

    inside, together, now = [], [], ComponentBytes.now

    def slow(self, *given):
        inside.append(1)
        time.sleep(0.002)
        together.append(len(inside))
        inside.pop()
        return now(self, *given)

    monkeypatch.setattr(ComponentBytes, "now", slow)
    models, x = {name: torch.nn.Linear(2, 2) for name in ("one", "two")}, torch.ones(1, 2)

    def use(model):
        for number in range(20):
            model(x)
            if number % 5 == 0:
                run.mark("mark")
                assert run.peak and run.table()

    with qf.track(models, interval=0) as run:
        threads = [
            threading.Thread(target=use, args=(model,)) for model in (*models.values(), *models.values())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert set(together) == {1}
    assert run.left_out > 0, "a call does not wait for another one's sample"
    seconds = [sample.seconds for sample in run.samples]
    assert seconds == sorted(seconds)
    assert [sample.label for sample in run.samples].count("mark") == 16


def _called_while_hooked(base, call):
    """A layer that is called as another thread may do it: just after a hook of it was registered."""

    class Called(base):
        def register_forward_pre_hook(self, hook, **options):
            handle = super().register_forward_pre_hook(hook, **options)
            call(self)
            return handle

    return Called


def test_a_call_in_another_thread_while_the_block_begins():
    import torch

    x = torch.ones(1, 2)
    called = _called_while_hooked(torch.nn.Sequential, lambda layer: layer(x))
    layer = called(torch.nn.Linear(2, 2))
    with qf.track(layer):
        layer(x)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in layer.modules())


def test_a_call_in_another_thread_while_the_block_ends():
    import threading

    import torch

    x = torch.ones(1, 2)
    ends, registered = [], []

    def end(layer):
        registered.append(layer)
        if len(registered) == 2:  # the call after a short one
            ends.append(threading.Thread(target=memory.__exit__, args=(None, None, None)))
            ends[0].start()
            ends[0].join(0.2)

    layer = _called_while_hooked(torch.nn.Linear, end)(2, 2)
    memory = qf.track(layer)
    memory.__enter__()
    while not ends:
        layer(x)
    ends[0].join()
    count = len(memory.samples)
    memory._due = memory._due_in_short_calls = 0.0  # as if time had passed
    layer(x)
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks
    assert len(memory.samples) == count


def _interrupted_where_hooked(base):
    """A layer whose hooks Ctrl-C interrupts."""

    class Interrupted(base):
        def register_forward_hook(self, hook, **options):
            raise KeyboardInterrupt

    return Interrupted


def test_an_interrupt_while_the_block_begins_leaves_no_hooks(monkeypatch):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), _interrupted_where_hooked(torch.nn.Linear)(2, 2))
    with pytest.raises(KeyboardInterrupt), qf.track(model):
        pass
    assert not model[0]._forward_hooks
    model = torch.nn.Linear(2, 2)
    memory = qf.track(model)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "_take", interrupt)
    with pytest.raises(KeyboardInterrupt), memory:
        pass
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_interrupt_just_after_a_hook_was_registered_leaves_none(times):
    import torch

    class Interrupted(torch.nn.Linear):
        left = times

        def register_forward_hook(self, hook, **options):
            handle = super().register_forward_hook(hook, **options)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return handle

    x, model = torch.ones(1, 2), Interrupted(2, 2)
    with pytest.raises(KeyboardInterrupt), qf.track(model) as memory:
        for _ in range(100):  # short calls: the hook at the end goes and comes back
            model(x)
            memory._due_in_short_calls = 0.0
            model(x)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_interrupt_while_the_block_ends_leaves_no_hooks(monkeypatch):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    take_off, interrupts = watching._take_off, iter([None, KeyboardInterrupt])

    def interrupted(module, owner):
        if raised := next(interrupts, None):
            raise raised
        take_off(module, owner)

    monkeypatch.setattr(watching, "_take_off", interrupted)
    with pytest.raises(KeyboardInterrupt), qf.track(model):
        pass
    assert next(interrupts, "none is left") == "none is left"
    for module in (model, *model):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
