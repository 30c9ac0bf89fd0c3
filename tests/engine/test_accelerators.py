"""Every place of the package that names CUDA in code has a reason here; all else asks torch what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "diffusers_quantfix"
_NAMES = re.compile(r"(?<![A-Za-z])cuda(?![A-Za-z])")

UPSTREAM = "upstream's own method or function of this name is patched or called"
ITS_KERNELS = "upstream has these kernels for CUDA only"
AS_UPSTREAM = "the device types of upstream's own condition"

# (file, function) -> (what stands there, why)
REASONS: dict[tuple[str, str], tuple[set[str], str]] = {
    ("advisories/machine.py", "_native_library"): (
        {"'cuda'", "'compiled_with_cuda'"},
        "bitsandbytes has a native library of its own for CUDA",
    ),
    ("advisories/machine.py", "_torch_is_for_gpus"): (
        {"torch.version.cuda"},
        "asked beside torch.version.hip",
    ),
    ("advisories/quanto.py", ""): ({"'cuda'"}, ITS_KERNELS),
    ("fixes/bitsandbytes/cpu_packing.py", "patch"): ({"'cuda'"}, UPSTREAM),
    ("fixes/bitsandbytes/current_device.py", "patch"): (
        {"from torch import cuda"},
        "the kernels change CUDA's current device",
    ),
    ("fixes/accelerate/cuda_check_threads.py", "broken"): ({"'is_cuda_available'"}, UPSTREAM),
    ("models/following.py", ""): ({"'cuda'"}, UPSTREAM),
    ("fixes/transformers/four_bit_cuda.py", "broken"): ({"'PreTrainedModel.cuda'"}, UPSTREAM),
    ("fixes/transformers/four_bit_cuda.py", "patch"): ({"'cuda'"}, UPSTREAM),
    ("fixes/transformers/four_bit_cuda.py", "cuda"): ({"super(cls, self).cuda"}, UPSTREAM),
    ("fixes/bitsandbytes/int8_fp16_weights.py", "_name"): ({"'cuda'"}, UPSTREAM),
    ("fixes/bitsandbytes/int8_requantize.py", "patch"): ({"'cuda'"}, UPSTREAM),
    ("fixes/bitsandbytes/int8_requantize.py", "cuda"): ({"'cuda'"}, UPSTREAM),
    ("fixes/diffusers/cpu_only.py", "_dequantize"): ({"torch.cuda"}, AS_UPSTREAM),
    ("fixes/diffusers/cpu_only.py", "any_accelerator"): ({"torch.cuda"}, AS_UPSTREAM),
    ("fixes/diffusers/eight_bit_hooks_follow.py", "patch"): ({"'cuda'"}, UPSTREAM),
    ("fixes/diffusers/param_device.py", "visit_Call"): ({"'torch.cuda.current_device()'"}, UPSTREAM),
    ("models/guarded.py", ""): ({"'cuda'"}, AS_UPSTREAM),
    ("fixes/peft/eight_bit_dequantize_cpu.py", "broken"): ({"'cuda'"}, UPSTREAM),
    ("fixes/peft/eight_bit_dequantize_cpu.py", "where_weights_are_taken"): ({"'cuda'"}, AS_UPSTREAM),
    ("fixes/quanto/fp8_plain.py", "create"): ({"'cuda'"}, ITS_KERNELS),
    ("fixes/transformers/eight_bit_cuda.py", "broken"): ({"'PreTrainedModel.cuda'"}, UPSTREAM),
    ("loading/device.py", "accelerator_types"): (
        {"'cuda'", "torch.cuda"},
        "the first of those that torch has a module for; the others are asked, too",
    ),
    ("loading/device.py", "_existing"): (
        {"'cuda'"},
        "a number of a device where there is no accelerator: the error has to name one",
    ),
    ("memory/census.py", ""): ({"torch.cuda"}, "the graphs of CUDA, beside those of XPU"),
    ("memory/guard.py", ""): ({"'cuda'"}, "methods of a module, beside xpu()"),
    ("models/eight_bit_model.py", "open_gates"): ({"'cuda'"}, UPSTREAM),
    ("models/eight_bit_model.py", "cuda"): ({"'cuda'"}, UPSTREAM),
    ("models/guarded.py", "gets_past_the_guard"): (
        {"'cuda'"},
        "one of the device types that upstream guards",
    ),
    ("weights/int8_params.py", "_rows"): ({"'cuda'", "tiles.is_cuda", "torch.cuda"}, ITS_KERNELS),
    ("weights/quanto_extension.py", "cuda_kernels_are_there"): (
        {"'optimum.quanto.library.extensions.cuda'"},
        ITS_KERNELS,
    ),
}
# verify shows the defects as they were reported, on CUDA devices; `--rig` has them where there are none.
APART = ("verify/", "fixes/index.py")


def names_it(node: ast.AST) -> bool:
    """Whether it is such a text of code, attribute or import; a text with spaces is a sentence for people."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and " " not in node.value and bool(_NAMES.search(node.value))
    if isinstance(node, ast.Attribute):
        return node.attr in ("cuda", "is_cuda")
    return isinstance(node, ast.ImportFrom | ast.Import) and bool(_NAMES.search(ast.unparse(node)))


def named(path: Path) -> dict[str, set[str]]:
    """Function (its own name; "" outside of all) -> what it says of CUDA, without sentences and declarations."""
    found: dict[str, set[str]] = {}

    def visit(node: ast.AST, function: str) -> None:
        is_declaration = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FIX"
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_declaration or is_docstring:
            return
        if names_it(node):
            found.setdefault(function, set()).add(ast.unparse(node))
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def test_every_place_that_names_cuda_has_its_reason():
    found = {
        (name, function): said
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(APART)
        for function, said in named(path).items()
    }
    assert {
        place: said for place, said in found.items() if said != REASONS.get(place, (set(), ""))[0]
    } == {}, (
        "ask diffusers_quantfix.loading.device, torch.accelerator or the type of a device, or say here why not"
    )
    assert not set(REASONS) - set(found), "these name CUDA no more"


def test_what_is_looked_for_is_found(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        '"""About cuda."""\nfrom torch import cuda\nFIX = Fix(id="a-cuda")\n'
        'def f(x):\n    """cuda:1"""\n    if x.is_cuda or torch.cuda.is_available():\n'
        '        raise ValueError("not on cuda")\n    return x.to("cuda:0") if x.type == "cuda" else make_cuda\n'
    )
    assert named(path) == {
        "": {"from torch import cuda"},
        "f": {"x.is_cuda", "torch.cuda", "'cuda:0'", "'cuda'"},
    }
