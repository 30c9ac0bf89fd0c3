"""The Python blocks of the libraries' documentation, run word for word without the package and with it.

    python -m tests.documentation --docs REPOSITORY --set D15 --write                  # of diffusers
    python -m tests.documentation --library peft --docs REPOSITORY --set D15 --write

Needs a git clone of the library, of which nothing is kept: a block is known by the digest of its text.  The blocks of a
page run in one process, in order and in one namespace, on the rig's devices, with tiny random models under the names
of the Hub (`hub`).  Sizes and step counts are made smaller (`pages`), torch.compile traces without generating code,
and pictures from the network are replaced.  Compared are how a block ends, and the tensors and pictures that it makes.

Recorded in results.json, by library and release: the digest of each block, and how it ended.  A block that fails with
the package must have a reason in `reasons`; `--check` lists the blocks of a clone that are new or have changed.
"""
