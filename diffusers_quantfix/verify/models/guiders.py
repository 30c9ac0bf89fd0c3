"""A run of a guider, with predictions that need no model."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STEPS = 4


def run(guider: Any) -> Any:
    """What all steps of a run are guided to: [steps, 1, 2, 4] on the CPU."""
    import torch

    guided = []
    for step in range(STEPS):
        guider.set_state(step=step, num_inference_steps=STEPS, timestep=torch.tensor(STEPS - step))
        data = [_Prediction(guider, turn) for turn in range(guider.num_conditions)]
        guided.append(guider(data)[0])
    return torch.stack(guided)


class _Prediction:
    """What a pipeline's loop keeps of one condition of a step; each condition's numbers differ."""

    def __init__(self, guider: Any, turn: int) -> None:
        import torch

        self.noise_pred = torch.linspace(1.0, 2.0 + turn, 8).reshape(1, 2, 4)
        setattr(self, guider._identifier_key, guider._input_predictions[turn])
