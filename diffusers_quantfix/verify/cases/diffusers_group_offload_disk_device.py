"""A layer is offloaded to disk, and used on the second GPU."""

from __future__ import annotations

from ..case import CannotReproduce, NeedsDevice


def case(work: str) -> str | None:
    import torch

    if torch.cuda.device_count() < 2:
        raise NeedsDevice("needs two CUDA devices")
    try:
        from diffusers.hooks import apply_group_offloading
    except ImportError:
        raise CannotReproduce("this diffusers has no group offloading") from None

    torch.manual_seed(0)
    device = torch.device("cuda", 1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    inputs = torch.ones(2, 64, device=device)
    with torch.no_grad():
        expected = model.to(device)(inputs).cpu()
        try:
            apply_group_offloading(
                model.to("cpu"), device, offload_type="leaf_level", offload_to_disk_path=work
            )
        except TypeError as error:
            raise CannotReproduce(f"this diffusers does not offload to disk ({error})") from None
        output = model(inputs).cpu()
    assert torch.equal(output, expected), "the output changed"
    return "the layers are loaded onto cuda:1; output exact"
