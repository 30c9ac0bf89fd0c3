"""int4 and int2 weights run where nothing can be compiled."""

from __future__ import annotations


def case(work: str) -> str | None:
    from ..models import quanto_models

    reference = quanto_models.run(quanto_models.plain_layers())
    with quanto_models.no_compiler() as attempts:
        errors = [
            quanto_models.error(quanto_models.run(quanto_models.layers(qtype)), reference)
            for qtype in ("qint4", "qint2")
        ]
    assert len(attempts) == 1, f"{len(attempts)} attempts to compile"
    figures = " and ".join(f"{off:.3f}" for off in errors)
    return f"runs without a compiler, after one attempt; relative error of int4 and int2: {figures}"
