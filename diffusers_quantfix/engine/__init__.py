"""The machinery that decides, installs, records and undoes.  It knows no library by name.

From an import to a patched function:

1. A module that some fix patches is imported.  `watcher`, a finder on ``sys.meta_path``, has put its own loader around
   the module's; when the module is executed, that loader calls `runner.Runner.arrived` with its name.
2. The runner takes the targets in that module, one after the other (`fix`: a fix has one target or several), and asks
   `settings` whether the user wants each of them patched.
3. `decision.Decider` compares the target's claim with the installed releases (`versions`).  Where the bug may be there,
   it imports the file of the fix and asks ``broken(module)``.
4. If that says True, ``patch(module, draft)`` names what is to be written (`draft`), with what it finds in the library
   (`probe`, `source`); `foreign` finds code of other tools in the same places.
5. `ledger.Ledger` writes the whole draft or nothing: each slot is an `entry` that knows its old value, and copies of a
   function in modules that imported it by name are replaced too.
6. ``broken(module)`` is asked once more: if it still says True, everything is undone.
7. The answer is kept: "applied", or another state with its reason.  `status` prints all of them as the `board`.
"""
