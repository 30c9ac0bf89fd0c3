"""A checkpoint of quanto weights with a scale of the wrong shape is loaded."""

from __future__ import annotations


def case(work: str) -> str | None:
    from optimum import quanto

    from ..models import quanto_models

    model = quanto_models.layers("qint8")
    state = model.state_dict()
    state["0.weight._scale"] = state["0.weight._scale"][:-1]
    try:
        quanto.requantize(quanto_models.plain_layers(), state, quanto.quantization_map(model))
    except RuntimeError as error:
        assert "0.weight._scale" in str(error), f"the error does not name the tensor: {error}"
        return "the error names the tensor"
    raise AssertionError("the checkpoint was loaded")
