"""torch.compile sees the same graphs with the package as without."""

from __future__ import annotations

from collections.abc import Iterator

from .figure import Row, figure
from .measure import child


@figure("compile")
def compiled() -> Iterator[Row]:
    for bits in (4, 8):
        with_us, without = (child("compiling:graphs", bits, package=side) for side in (True, False))
        equal = with_us == without
        yield Row(
            f"torch.compile of a {bits}-bit model: graphs with / without", with_us["graphs"] / without["graphs"],
            goal=1.0, exact=True,
            detail=f"{with_us['graphs']} and {without['graphs']} graphs, "
            f"{with_us['breaks']} and {without['breaks']} breaks, fullgraph: {with_us['fullgraph']} and "
            f"{without['fullgraph']}{'' if equal else ': NOT EQUAL'}",
        )  # fmt: skip


def graphs(bits: int) -> dict:
    """Graph and break counts of one forward pass, and whether it compiles as one graph."""
    import torch

    from .calls import _model

    model, inputs = _model(bits)
    model(inputs)
    said = torch._dynamo.explain(model)(inputs)
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(inputs)
        fullgraph = "yes"
    except Exception as error:
        fullgraph = f"no ({type(error).__name__})"
    return {"graphs": said.graph_count, "breaks": said.graph_break_count, "fullgraph": fullgraph}
