"""Many cycles of load, LoRA, offload, run, interrupt and release in one process: nothing may pile up.

    python -m tests.soak                       # 200 cycles, about ten minutes
    python -m tests.soak --cycles 500 --seed 7
    python -m pytest tests/soak                # 16 cycles, as in CI

The choices are random but seeded: a seed repeats a run.  With real CUDA devices it uses those, else `tests.rig`.
"""
