"""The machinery that decides, installs, records and undoes.  It does not know any library by name.

From an import to a patched function:

1. A module that some fix patches is imported.  `watcher`, a finder on ``sys.meta_path``, has put its own loader around
   the module's; when the module is executed, that loader calls `runner.Runner.arrived` with its name.
2. For each target in that module (`fix`: a fix has one or more targets), the runner asks `settings` whether the user
   wants it patched.
3. `decision.Decider` compares the target's claim with the installed releases (`versions`).  Where the bug may be
   present, it imports the fix's file and asks ``broken(module)``.
4. If that returns True, ``patch(module, draft)`` says what to write (`draft`), based on what it finds in the library
   (`probe`, `source`); `foreign` detects other tools' code in the same places.
5. `ledger.Ledger` writes the whole draft or nothing: each slot is an `entry` that knows its old value, and copies of a
   function in modules that imported it by name are replaced too.
6. ``broken(module)`` is asked again: if it still returns True, everything is undone.
7. The answer is kept: "applied", or another state with its reason.  `status` prints all of them as the `board`.
"""
