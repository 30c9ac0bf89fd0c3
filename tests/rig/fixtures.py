"""The ``gpu`` fixture: CUDA devices to test on, real ones where there are any and the rig's otherwise.

Listed in ``pytest_plugins`` of the top conftest. Where the rig's devices take time (`tests.rig.late`), a test fails if
its program does not wait for them; a test that is marked ``late(needs=...)`` always runs so, with the package and where
the release is as it says.
With ``DIFFUSERS_QUANTFIX_REQUIRE_RIG=1`` (CI) a missing rig fails the tests that need it; otherwise they are skipped
with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import os
import warnings
from collections.abc import Iterator

import pytest

from tests import rig
from tests.gate import unmet
from tests.rig import accelerator, toolchain, without_cuda

# Before anything imports torch. Where it cannot be done, `rig.unavailable_reason` tells those who ask for devices.
with contextlib.suppress(toolchain.Unavailable):
    without_cuda.keep_out()
accelerator.rename_in_tests()
if glob.glob("/dev/nvidia[0-9]*"):
    # Else 32 MiB and more that no tensor holds count as allocated, since the first product of matrices.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":0:0", CUBLASLT_WORKSPACE_SIZE="0")

_DEVICES = {"gpu", "rig_devices"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Load the rig before the first test: autograd counts the devices at the first backward pass, and only then."""
    if any(_DEVICES & set(getattr(item, "fixturenames", ())) for item in items):
        rig.load()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Inside of `tests.sides`, so that a hazard is what a test shows."""
    result = yield
    if _DEVICES & set(pyfuncitem.fixturenames):  # else a test has devices of its own, and plants hazards
        rig.assert_waited()
    return result


def _is_late(item: pytest.Item) -> bool:
    """Whether the devices of a test take time."""
    if rig.is_late_asked_for():
        return True
    mark = item.get_closest_marker("late")
    if mark is None or unmet(mark.kwargs["needs"]):
        return False
    # Upstream's own hazards are no symptom of the fix that a test is about, unless it says that they are.
    return item.config.getoption("--side") == "patched" or mark.kwargs.get("shows_bare", False)


class RigDevices:
    """The rig's devices, seen through the interface of the ``gpu`` fixture."""

    kind = "rig"

    def __init__(self):
        import torch

        self.devices: list[torch.device] = [
            torch.device(accelerator.KIND, i) for i in range(rig.device_count())
        ]

    @property
    def two(self) -> tuple:
        """Two CUDA devices."""
        return self.devices[0], self.devices[1]

    pair = two

    def allocated(self, device) -> int:
        """Bytes that live tensors hold on a device."""
        return rig.allocated(device)

    def peak(self, device) -> int:
        """The most bytes held on a device since the last ``reset()``."""
        return rig.peak(device)

    def traffic(self, device=None) -> rig.Traffic:
        """Bytes copied between devices since the last ``reset()``; skips the test on real devices."""
        return rig.traffic(device)

    def overlapping(self, device=None) -> int:
        """Bytes copied to a device while it could compute, see ``rig.overlapping``; skips on real devices."""
        return rig.overlapping(device)

    def reset(self) -> None:
        """Traffic and peaks start over, the first device becomes the current one."""
        rig.reset()


class RealDevices:
    """The CUDA devices of this machine, seen through the interface of the ``gpu`` fixture."""

    kind = "cuda"

    def __init__(self):
        import torch

        self._cuda = torch.cuda
        self.devices: list[torch.device] = _Devices(
            torch.device("cuda", i) for i in range(torch.cuda.device_count())
        )
        _start_autograd()

    @property
    def two(self) -> tuple:
        """Two CUDA devices; skips the test where there is one only."""
        return self.devices[0], self.devices[1]

    @property
    def pair(self) -> tuple:
        """Two different devices to move things between: the CPU is the second one where there is one GPU only."""
        import torch

        if len(self.devices) > 1:
            return self.two
        # Kernels of the CPU and of a GPU do not round alike.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(torch, "equal", _close)
        return self.devices[0], torch.device("cpu")

    _patch: pytest.MonkeyPatch | None = None

    def close(self) -> None:
        """At the end of a test."""
        if self._patch is not None:
            self._patch.undo()

    def allocated(self, device) -> int:
        """Bytes that live tensors hold on a device, without what torch adds to each."""
        gc.collect()
        if str(device) == "cpu":
            return 0
        self._cuda.synchronize(device)
        self._cuda.empty_cache()  # frees what waited for the end of a stream's work
        return self._cuda.memory_stats(device).get("requested_bytes.all.current", 0)

    def peak(self, device) -> int:
        return self._cuda.memory_stats(device).get("requested_bytes.all.peak", 0)

    def traffic(self, device=None) -> rig.Traffic:
        pytest.skip("the bytes copied between real devices are not counted")

    def overlapping(self, device=None) -> int:
        pytest.skip("the bytes copied between real devices are not counted")

    def reset(self) -> None:
        gc.collect()
        for device in self.devices:
            self._cuda.synchronize(device)
            self._cuda.reset_peak_memory_stats(device)
        self._cuda.set_device(0)


class _Devices(list):
    def __getitem__(self, index):
        if isinstance(index, int) and index >= len(self):
            pytest.skip(f"needs {index + 1} CUDA devices")
        return super().__getitem__(index)


def _close(one, other) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool((one == other.to(one.device)).all())
    furthest = (one.double() - other.to(one.device).double()).abs().max() if one.numel() else 0
    return bool(furthest <= 0.03 * other.double().abs().max().clamp(min=1e-3)) if one.numel() else True


@functools.cache
def _start_autograd() -> None:
    """The first product in the thread of a device warns that it has no context yet."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (
            torch.ones(2, 2, device="cuda", requires_grad=True) @ torch.ones(2, 2, device="cuda")
        ).sum().backward()


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[RigDevices | RealDevices]:
    """CUDA devices, fresh for each test: ``devices``, ``kind``, ``allocated``, ``peak``, ``traffic``, ``reset``."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() and accelerator.KIND == "cuda":
        if "cuda:1" in request.node.name and torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        devices = RealDevices()
        devices.reset()
        with _slow(request.node), contextlib.closing(devices):
            yield devices
    else:
        require_rig()
        with rig.devices(late=_is_late(request.node)):
            yield RigDevices()


@contextlib.contextmanager
def _slow(item: pytest.Item) -> Iterator[None]:
    """Real devices take time where those of the rig would."""
    from tests.rig import slow

    with slow.streams(0, layers=False) if _is_late(item) else contextlib.nullcontext():
        yield


@pytest.fixture
def rig_devices(request: pytest.FixtureRequest) -> Iterator[RigDevices]:
    """The rig's devices, for tests of things that real ones cannot do or tell, such as counting traffic."""
    require_rig()
    with rig.devices(late=_is_late(request.node)):
        yield RigDevices()


def require_rig() -> None:
    """Load the rig, or skip (in CI: fail) the test with the reason."""
    reason = rig.unavailable_reason()
    if reason and os.environ.get("DIFFUSERS_QUANTFIX_REQUIRE_RIG") == "1":
        pytest.fail(f"the rig is required and not available: {reason}")
    if reason:
        pytest.skip(f"no CUDA device, and the rig is not available: {reason}")
