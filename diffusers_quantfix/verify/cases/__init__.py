"""One file per fix, named by its id: ``case(work: str) -> str`` reproduces the bug."""
