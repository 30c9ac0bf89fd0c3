"""`audit` tells of a view on the CPU that keeps more memory than it shows."""

from __future__ import annotations

import pytest

import diffusers_quantfix

torch = pytest.importorskip("torch")

MOST = 1 << 20


class Part(torch.nn.Module):
    def __init__(self, *views):
        super().__init__()
        for index, view in enumerate(views):
            self.register_buffer(f"view{index}", view)


def notes(*views):
    return [note for note in diffusers_quantfix.audit(Part(*views)).notes if "is a view" in note]


def test_a_small_view_of_a_large_tensor():
    base = torch.zeros(MOST)
    (note,) = notes(base[:4])
    assert "Part.view0 is a view on the CPU: 16 B of 4.2 MB" in note
    (note,) = notes(base[:4], base[8:16])
    assert "48 B of 4.2 MB" in note
    assert diffusers_quantfix.audit(Part(base[:4])).ok


@pytest.mark.parametrize(
    "views",
    [
        lambda base: [base],
        lambda base: [base[: MOST // 2], base[MOST // 2 :]],
        lambda base: [base.view(-1, 2), base[:4]],
        lambda base: [base[:4].clone()],
        lambda base: [base[:-8]],
    ],
    ids=["whole", "all parts", "whole and a part", "copied", "padding"],
)
def test_what_keeps_no_more(views):
    assert notes(*views(torch.zeros(MOST))) == []


def test_on_a_device_the_whole_is_counted(gpu):
    device = gpu.devices[0]
    audit = diffusers_quantfix.audit(Part(torch.zeros(MOST, device=device)[:4]))
    assert audit.bytes == {str(device): 4 * MOST}
    assert not audit.notes
