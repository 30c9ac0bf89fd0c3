"""A pipeline with an 8-bit transformer is moved to the CPU in float16, as in diffusers issue 11352."""

from __future__ import annotations

import logging

from ...engine.versions import is_installed
from ..case import CannotReproduce
from ..models import flux, one_model
from ..models.devices import cuda

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

WARNING = "cannot run with `cpu` device"


def case(work: str) -> str | None:
    import torch

    cuda("this diffusers quantizes on a GPU only")
    if is_installed("diffusers", "<0.33"):
        raise CannotReproduce("shows with text encoders of transformers only in diffusers before 0.33")

    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    flux.transformer().save_pretrained(work)
    model = FluxTransformer2DModel.from_pretrained(
        work, quantization_config=BitsAndBytesConfig(load_in_8bit=True), torch_dtype=torch.float16
    )
    said = warnings_of(lambda: one_model.pipeline(model).to("cpu"))
    assert WARNING in said, f"pipe.to('cpu') does not warn about float16 on the CPU: {said or 'no warning'}"
    return "pipe.to('cpu') warns that a float16 pipeline cannot run there"


def warnings_of(call: Callable[[], object]) -> str:
    """What diffusers' pipelines log while ``call`` runs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logger = logging.getLogger("diffusers.pipelines.pipeline_utils")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return "\n".join(record.getMessage() for record in records)
