"""What surrounds the import of a target in its program, kept away from a probe, and a probe from it.

Libraries are often imported lazily, in the middle of their use: transformers imports optimum-quanto, and with it
diffusers, while new tensors go to ``meta``.  A probe that builds a layer would fail there, and its random weights would
change the numbers that the program draws next.
"""

from __future__ import annotations

import contextlib

from .engine.target import finished

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["usual"]


@contextlib.contextmanager
def usual() -> Iterator[None]:
    """Torch as it is in a new process: float32 tensors on the CPU, with gradients.

    Afterwards all is as before, the state of the random numbers too.  Nothing happens where torch is not imported.
    """
    torch = finished("torch")
    if torch is None:
        yield
        return
    dtype = torch.get_default_dtype()
    with (
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
