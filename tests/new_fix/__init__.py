"""Starts a new fix: ``python -m tests.new_fix ID --target MODULE``; removes one: ``--remove ID``.

The start writes the fix, its test, its case of `verify` and its line of the changelog as stubs, and the generated
index.  What is given on the command line is written wherever it belongs, so nothing has to be typed twice.  Every place
that is left is marked FILL IN; until the last one is gone the tests fail and name it.

``--remove`` deletes the fix, its test and its cases, its lines in the changelog, in errors.txt, in the results and in
the generated files, and prints every other place that names it.
"""
