"""Two threads in the middle of the same work at once."""

from __future__ import annotations

import contextlib
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["kept", "layers_keep_weights", "overlapping", "overlapping_calls", "while_a_model_is_made"]

_MOMENT = 2.0  # seconds; a thread that waits for its turn is not waited for longer


def overlapping_calls(
    call: Callable[[Callable[[], object]], object], look: Callable[[], Any] = lambda: None
) -> Any:
    """Another thread begins and ends ``call(middle)``; this thread begins it after the other one, and ends it after.

    Args:
        call: the work; it calls ``middle()`` in the middle.
        look: called in this thread while only the other one is in the middle.

    Returns:
        What ``look()`` returned.
    """
    within, both, left = threading.Event(), threading.Event(), threading.Event()

    def middle_of_other() -> None:
        within.set()
        both.wait(_MOMENT)

    def middle() -> None:
        both.set()
        left.wait(_MOMENT)

    def other() -> None:
        try:
            call(middle_of_other)
        finally:
            within.set()
            left.set()

    thread = threading.Thread(target=other)
    thread.start()
    within.wait()
    try:
        seen = look()
        call(middle)
    finally:
        thread.join()
    return seen


def overlapping(context: Callable[[], Any], look: Callable[[], Any] = lambda: None) -> Any:
    """The same with a context manager around the middle."""

    def call(middle: Callable[[], object]) -> None:
        with context():
            middle()

    return overlapping_calls(call, look)


def while_a_model_is_made(work: str, load: Callable[[Callable[[], object]], Any]) -> Any:
    """Another thread makes a text encoder in bfloat16, until it is told to go on; meanwhile this thread loads a model.

    Args:
        work: a folder for the text encoder.
        load: loads the model and calls its argument when the model is made.

    Returns:
        What ``load`` returned.
    """
    import torch
    from transformers import T5Config, T5EncoderModel

    within, made = threading.Event(), threading.Event()
    T5EncoderModel(
        T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(work)

    class Slow(T5EncoderModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            within.set()
            made.wait(_MOMENT)

    def other() -> None:
        try:
            Slow.from_pretrained(work, torch_dtype=torch.bfloat16)
        finally:
            within.set()

    thread = threading.Thread(target=other)
    thread.start()
    within.wait()
    try:
        return load(made.set)
    finally:
        made.set()
        thread.join()


def layers_keep_weights(context: Callable[[], Any]) -> str:
    """Two threads enter a context manager that makes models without weights; layers are made meanwhile and afterwards.

    Returns:
        What is shown, as a sentence.
    """
    import torch

    def device() -> str:
        return str(torch.nn.Linear(1, 1).weight.device)

    with kept((torch.nn.Module, "register_parameter")):
        meanwhile = overlapping(context, device)
        afterwards = device()
    assert afterwards == "cpu", f"all new layers are on {afterwards}"
    assert meanwhile == "cpu", f"a layer of another thread is on {meanwhile}"
    return "new layers have weights, meanwhile and afterwards"


@contextlib.contextmanager
def kept(*places: tuple[Any, str]) -> Iterator[None]:
    """Put back attributes, as (owner, name), and the default dtype: without the patch they are left changed."""
    import torch

    before = [(owner, name, vars(owner)[name]) for owner, name in places]
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        torch.set_default_dtype(dtype)
