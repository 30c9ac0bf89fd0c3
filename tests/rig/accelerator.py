"""Under which name the rig presents its devices: CUDA, or what ``$DIFFUSERS_QUANTFIX_RIG_AS`` says, which is XPU.

Under another name the tests of ``tests/fixes`` and ``tests/tools`` say it, too: wherever their code says "cuda", it
reads "xpu". So what asks for CUDA where an accelerator is meant, in the package or in upstream, is seen:

    DIFFUSERS_QUANTFIX_RIG_AS=xpu python -m pytest tests/fixes/test_diffusers_group_offload_quanto.py
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

VARIABLE = "DIFFUSERS_QUANTFIX_RIG_AS"
KIND = os.environ.get(VARIABLE) or "cuda"
KINDS = {"cuda": 1, "xpu": 12}  # with the numbers of c10::DeviceType
if KIND not in KINDS:
    raise ValueError(f"{VARIABLE}={KIND} is none of {', '.join(KINDS)}")
KEY = KIND.upper()  # torch's dispatch key

_RENAMED = {Path(__file__).parents[1] / name for name in ("fixes", "tools")}
_CUDA = re.compile(r"(?<![\w-])cuda(?![\w-])")  # not in the id of a fix


def rename_in_tests() -> None:
    """From now on the modules of these folders are imported with the other name; call it before the first is."""
    if KIND != "cuda":
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(("tests.fixes.", "tests.tools.", "test_")):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or Path(spec.origin).parent not in _RENAMED:
            return None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=_Loader(name, spec.origin))


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew each time, so that nothing of it is kept in a cache of bytecode."""
        tree = _Rename().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Rename(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value = _CUDA.sub(KIND, node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        node.attr = {"cuda": KIND, "is_cuda": f"is_{KIND}"}.get(node.attr, node.attr)
        return node
