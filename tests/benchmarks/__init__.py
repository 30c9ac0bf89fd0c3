"""What the package costs and what it saves: every figure a ratio or a count, measured in one run.

    python -m tests.benchmarks [--json FILE [--again]] [--repeat TIMES] [--limit SECONDS] [--compare FILE] [FIGURE ...]
    python -m tests.benchmarks --compare OLD NEW

Times are processor seconds of interleaved processes or calls, and medians of them: machines are shared, and a figure
must not depend on who else is at work. Counts (bytes, frames, graphs, modules) are asserted by the tests as well;
times never are.
"""
