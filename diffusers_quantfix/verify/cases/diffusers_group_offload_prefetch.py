"""An exception ends a pass under group offloading with a stream; then the next layer's weights are changed."""

from __future__ import annotations


def case(work: str) -> str | None:
    import torch

    from ..models import group_offload

    class Stopped(Exception):
        pass

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if self.passes == 3 and i == 0:
                    raise Stopped
            return x

    def build(device):
        torch.manual_seed(0)
        return Model().to(device).eval()

    def run(model, device):
        inputs = torch.ones(2, 256, device=device)
        with torch.no_grad():
            for _ in range(2):
                model(inputs)
            model.passes = 2
            try:
                model(inputs)
            except Stopped:
                torch.cuda.synchronize()  # a tensor that is being copied must not be changed
                model.layers[1].weight.data.mul_(1.5)
            model.passes = 3
            return model(inputs).cpu()

    return group_offload.check(build, run, times=1, use_stream=True)
