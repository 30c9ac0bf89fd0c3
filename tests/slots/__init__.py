"""Every patched slot is inspected, pickled and copied without the package and with it: the answers are the same."""
