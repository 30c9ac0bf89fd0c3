"""Random modules, shared storages, views, exporters and threads: `release` frees nothing that is being read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import diffusers_quantfix as qf
from diffusers_quantfix.memory import ReleasedError

SIZE = 8
SEED = int(os.environ.get("RELEASE_FUZZ_SEED", "0"))


class World:
    """One random situation, made from one seed."""

    def __init__(self, seed: int) -> None:
        import torch

        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.weights: list = []
        self.model = self._tree(3)
        for number, parameter in enumerate(self.weights):
            torch.nn.init.constant_(parameter, number + 1.0)
        self.names: list = []  # (something of Python that keeps a weight, its address)
        self.readers: list = []  # (read, value): these must go on reading it
        for _ in range(self.chance.randrange(6)):
            number = self.chance.randrange(len(self.weights))
            self.chance.choice((self._name, self._reader))(self.weights[number], number + 1.0)
        if self.chance.random() < 0.3:
            for module in self.model.modules():
                module.register_forward_hook(lambda module, args, output: None)

    def _tree(self, depth: int):
        import torch

        children = []
        for _ in range(self.chance.randrange(1, 4)):
            if depth and self.chance.random() < 0.5:
                children.append(self._tree(depth - 1))
                continue
            layer = torch.nn.Linear(SIZE, SIZE, bias=False)
            if self.weights and self.chance.random() < 0.3:
                shared = self.chance.choice(self.weights)
                # the same parameter, or another one with its memory
                layer.weight = shared if self.chance.random() < 0.5 else torch.nn.Parameter(shared.data)
            if not any(layer.weight.data_ptr() == other.data_ptr() for other in self.weights):
                self.weights.append(layer.weight)
            children.append(layer)
        return torch.nn.Sequential(*children)

    def _name(self, weight, value: float) -> None:
        def iterate():
            yield weight
            yield value

        iterator = iterate()
        next(iterator)
        made = self.chance.choice(
            (
                lambda: weight,
                lambda: {"deep": [(weight.detach(),)]},
                lambda: weight.t()[1:],
                lambda: weight.untyped_storage(),
                lambda: (weight.flatten() ** 2).sum(),
                lambda: weight.square(),
                lambda: iterator,
                lambda: lambda: weight,
            )
        )
        self.names.append((made(), weight.data_ptr()))

    def _reader(self, weight, value: float) -> None:
        import numpy
        import torch

        source = self.chance.choice(
            (lambda: weight.detach(), lambda: weight.data[1:], lambda: weight.detach().t())
        )()
        kind = self.chance.randrange(5)
        if kind == 0:
            held = source.numpy()
        elif kind == 1:
            held = numpy.asarray(memoryview(source.numpy()))
        elif kind == 2:
            held = numpy.from_dlpack(source)
        elif kind == 3:
            held = torch.from_dlpack(source)
        else:
            capsule = torch.utils.dlpack.to_dlpack(source)
            self.readers.append(
                (lambda: torch.utils.dlpack.from_dlpack(capsule).numpy(), value, weight.data_ptr())
            )
            return
        self.readers.append((lambda: held, value, weight.data_ptr()))

    def check(self) -> None:
        import torch

        whole = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self.weights}
        read = {address for _, _, address in self.readers} | {address for _, address in self.names}
        # What a thread is computing with is waited for; `weights` itself would keep all of them.
        self.weights.clear()
        report = qf.release(self.model, verify=False, wait=60)
        junk = [torch.full((SIZE, SIZE), -7.0) for _ in range(64)]
        assert all(bool((reader() == value).all()) for reader, value, _ in self.readers)
        left = sum(survivor.bytes for survivor in report.survivors)
        assert report.freed.get("cpu", 0) + left == sum(whole.values())
        assert left == sum(size for address, size in whole.items() if address in read), report
        with pytest.raises(ReleasedError):
            self.model(torch.ones(1, SIZE))
        del junk


def _many(count: int) -> None:
    pytest.importorskip("numpy")
    for number in range(count):
        seed = SEED + number
        print(f"RELEASE_FUZZ_SEED={seed}")  # pytest shows it when the check fails
        World(seed).check()


def _work(world: World, inputs, results: list) -> None:
    import torch

    try:
        while True:
            with torch.no_grad():
                results.append(world.model(inputs))
    except BaseException as error:
        results.append(error)


def _in_threads(count: int) -> None:
    import torch

    for number in range(count):
        seed = SEED + number
        print(f"RELEASE_FUZZ_SEED={seed}")
        world, inputs = World(seed), torch.ones(4, SIZE)
        with torch.no_grad():
            wanted = world.model(inputs)
        results: list = []
        threads = [
            threading.Thread(target=_work, args=(world, inputs, results), daemon=True)
            for _ in range(world.chance.randrange(1, 4))
        ]
        for thread in threads:
            thread.start()
        world.check()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        errors = [result for result in results if not isinstance(result, torch.Tensor)]
        assert len(errors) == len(threads)
        assert all(isinstance(error, (ReleasedError, AttributeError)) for error in errors), errors
        assert all(torch.equal(result, wanted) for result in results if isinstance(result, torch.Tensor))


def test_random_worlds():
    """Before: the first world with an array of a weight had nothing left of it."""
    _many(8)


def test_random_worlds_with_threads():
    """Before: as without threads, and torch's errors about shapes in the threads."""
    _in_threads(3)


@pytest.mark.long
def test_many_random_worlds():
    """In a process of its own: `release` looks at every live object, and this one has those of all tests."""
    root = Path(__file__).parents[2]
    code = "from tests.tools.test_release_fuzz import _many, _in_threads; _many(150); _in_threads(40)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root, timeout=600
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]
