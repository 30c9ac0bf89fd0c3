"""The release matrix: every fix on real releases, without us and with us, and its claim exact in both directions.

    python -m tests.upstream --cells ci --jobs 2             # the sets of CI; half of them: --part 1/2
    python -m tests.upstream --cells all --jobs 2            # every cell, and every bitsandbytes on its own
    python -m tests.upstream --cells D04 D05                 # some
    python -m tests.upstream --cells all --fixes ID --write  # a new fix on every cell; its results into the page
    python -m tests.upstream --add diffusers=latest          # a new release of a library: what became of the fixes?
    python -m tests.upstream --add diffusers=latest --write  # the same, and extend or close every claim it decides
    python -m tests.upstream.tables --write                  # the generated pages: FIXES.md and COMPATIBILITY.md

A *cell* is a pinned set of releases in a virtual environment of its own (`cells.toml`).  In each of them the tests of
the fixes run twice in separate processes (`tests.sides`), and `tests.upstream.inspect_fixes` looks at every target
that a fix declares.  `verdict` judges; the result of a cell is one JSON file in the folder of the driver.  ``--write``
merges what was seen into the committed `results.json`, from which the compatibility page is generated.

uv builds the environments, from the folder of local wheels that ``PIP_FIND_LINKS`` names, and the index.  A torch that
comes from the index is a CUDA build of several GB, on which the rig runs as well; ``UV_TORCH_BACKEND=cpu`` takes CPU
builds from PyTorch's own index instead.  What a run needs of disk and time is printed before it begins.
"""
