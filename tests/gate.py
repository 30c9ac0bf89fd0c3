"""What the package itself would decide about a fix, without installing anything."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from diffusers_quantfix.engine.errors import TargetMissing, Undecided
from diffusers_quantfix.engine.versions import contains, installed_version, judge
from diffusers_quantfix.fixes.targets import TARGETS, fix_module

# From which torch on Dynamo puts a layer into one graph; before, it fails on the same layer without this package, too.
ONE_GRAPH = {"4-bit": "torch>=2.8", "8-bit": "torch>=2.10", "gguf": "torch>=2.8"}


@functools.cache
def gate(fix_id: str) -> tuple[bool, str]:
    """(whether claim and probe say broken, the sentence why) for a target and the libraries installed here.

    Call it on the bare side only: the probe of a patched target says healthy.
    """
    target, fix = TARGETS[fix_id], fix_module(fix_id)
    verdict = judge(target.claims)
    if not verdict.fits:
        return False, f"{verdict.kind}: {verdict.reason}"
    try:
        broken = probe(fix, importlib.import_module(target.module))
    except TargetMissing as gone:
        return False, f"missing: {gone}"
    return broken, f"{'broken' if broken else 'healthy'}: {verdict.reason}"


def probe(fix: Any, module: ModuleType) -> bool:
    """What the probe of a fix says of its target; a module that it needs is imported, as `status` does."""
    for _ in range(3):
        try:
            return bool(fix.broken(module))
        except Undecided as later:
            importlib.import_module(later.needs)
    raise AssertionError(f"{fix.FIX.id} names one more module that it needs, again and again")


def unmet(requirement: str) -> str:
    """Why a requirement such as ``diffusers>=0.33`` does not hold here, as a sentence; empty when it does."""
    name = requirement.rstrip("0123456789.,<>=! ")
    specifier = requirement[len(name) :].strip()
    name = name.strip()
    version = installed_version(name)
    if version is None:
        return f"needs {requirement}: {name} is not installed"
    SpecifierSet(specifier)
    return "" if contains(specifier, version) else f"needs {requirement}: {version} is installed"
