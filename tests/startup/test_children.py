"""Processes that others start: workers of torch, accelerate's launcher, Jupyter kernels, embedding programs."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.startup.conftest import ACTIVE, Environment, checked

WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
class Asks(Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return int(ACTIVE)
if __name__ == "__main__":
    loader = DataLoader(Asks(), num_workers=1, multiprocessing_context=sys.argv[1])
    print([int(batch) for batch in loader])
""".replace("ACTIVE", ACTIVE)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.long
def test_the_workers_of_a_data_loader(stack_environment: Environment, way: str):
    program = stack_environment.folder / "workers.py"
    program.write_text(WORKERS)
    done = checked(stack_environment.run(program, way, DIFFUSERS_QUANTFIX_AUTO="1"))
    assert done.stdout.strip() == "[1, 1]"


STATES = """
import json, sys
import diffusers_quantfix as qf
print("STATES", json.dumps({fix.id: fix.state for fix in qf.status(load=False)}))
"""


def states_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    (line,) = (line for line in checked(done).stdout.splitlines() if line.startswith("STATES "))
    states: dict[str, str] = json.loads(line.partition(" ")[2])
    return states


@pytest.mark.thorough
@pytest.mark.long
def test_accelerate_launch(stack_environment: Environment):
    program = stack_environment.folder / "launched.py"
    program.write_text(f"import sys; print('active:', {ACTIVE}, sys.argv[1:])\n")
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
    done = stack_environment.run(
        *launch, program, "--x", DIFFUSERS_QUANTFIX_AUTO="1", HOME=str(program.parent)
    )
    assert "active: True ['--x']" in checked(done).stdout
    done = stack_environment.run(
        "-m", "diffusers_quantfix", "run", *launch, program, "--x", HOME=str(program.parent)
    )
    assert "active: True ['--x']" in checked(done).stdout


@pytest.mark.long
@pytest.mark.thorough
def test_a_program_that_imports_the_libraries_first(stack_environment: Environment):
    program = "from accelerate import hooks\n" + STATES
    states = states_of(stack_environment.run("-c", program))
    fixes = [fix_id for fix_id in states if fix_id.startswith("accelerate-")]
    assert fixes
    assert "waiting" not in {states[fix_id] for fix_id in fixes}
    assert "applied" in {states[fix_id] for fix_id in fixes}


EMBEDS = """
#include <Python.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    PyConfig_SetBytesString(&config, &config.program_name, argv[1]);
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 3;
    int failed = PyRun_SimpleString(argv[2]);
    return Py_FinalizeEx() < 0 ? 4 : failed;
}
"""


@pytest.mark.thorough
def test_a_program_that_embeds_python(environment: Environment, tmp_path: pathlib.Path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    library = pathlib.Path(
        sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("LDLIBRARY") or ""
    )
    if compiler is None or not library.exists():
        pytest.skip("no C compiler, or this Python has no library to embed")
    source, program = tmp_path / "embeds.c", tmp_path / "embeds"
    source.write_text(EMBEDS)
    libraries = [
        *(sysconfig.get_config_var("LIBS") or "").split(),
        *(sysconfig.get_config_var("SYSLIBS") or "").split(),
    ]
    command = [
        compiler, source, "-o", program, f"-I{sysconfig.get_path('include')}", library,
        f"-Wl,-rpath,{library.parent}", "-Wl,-export-dynamic", *libraries,
    ]  # fmt: skip
    built = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"this Python cannot be embedded here: {built.stderr.splitlines()[-1:]}")
    asks = f"import sys; print({ACTIVE})"
    command = [str(program), str(environment.python), asks]
    on = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"DIFFUSERS_QUANTFIX_AUTO": "1"}
    )
    off = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert (checked(on).stdout.strip(), checked(off).stdout.strip()) == ("True", "False")


KERNEL = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")
said = []
client.execute_interactive("import sys; print(ACTIVE)", timeout=60,
    output_hook=lambda message: said.append(message["content"].get("text", "")))
client.stop_channels(); manager.shutdown_kernel(now=True)
print("".join(said).strip())
""".replace("ACTIVE", ACTIVE)


@pytest.mark.thorough
def test_a_jupyter_kernel(environment: Environment):
    for name in ("ipykernel", "jupyter_client"):
        pytest.importorskip(name, reason="no Jupyter here; a kernel is a process like another, see above")
    site = environment.site / "a_jupyter.pth"
    site.write_text(sysconfig.get_path("purelib") + "\n")
    try:
        home = str(environment.folder)
        done = environment.run("-c", KERNEL, DIFFUSERS_QUANTFIX_AUTO="1", HOME=home)
        assert checked(done).stdout.strip() == "True"
    finally:
        site.unlink()


def test_the_tests_of_children_run_the_wheel(environment: Environment):
    done = environment.run("-c", "import diffusers_quantfix; print(diffusers_quantfix.__file__)")
    assert str(environment.folder) in checked(done).stdout
    assert sys.prefix not in done.stdout
