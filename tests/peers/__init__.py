"""The tests of accelerate and PEFT themselves, without this package and with it.

    python -m tests.peers                        # D14, D10 and D04 of tests/upstream/cells.toml, both libraries
    python -m tests.peers --library peft --set D14 --place rig
    python -m tests.peers --quick                # what CI runs: a part of the newest set
    python -m tests.peers --write                # and the counts into results.json, which COMPATIBILITY.md tells

accelerate and PEFT ship their tests in the source distributions on the package index; bitsandbytes, diffusers and
optimum-quanto do not, and of transformers' tests only base classes are there.  The source distribution of the pinned
release is fetched by pip and kept in the folder of `tests.upstream.environments`, as is the environment of the set.
Every test runs four times, in separate processes: on the plain CPU and on the two fake CUDA devices of `tests.rig`,
each without the package and with it.  Nothing else is fetched: a checkpoint that a test asks the Hub for is there
only if `hub` has a tiny random one of that name.  Tests that fail on both sides for such a reason are counted.

A test that ends otherwise with the package is a failure, unless `intended.toml` has its reason.
"""
