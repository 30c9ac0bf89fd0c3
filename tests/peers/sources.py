"""The tests of a pinned release: its source distribution, fetched by pip, and the files that are run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.environments import CannotInstall, locked


@dataclass(frozen=True)
class Library:
    """A library whose tests are run.

    Attributes:
        files: file of its tests -> pattern of the tests to run (of `re.search`, over the test's name); "" for all.
        quick: the same, for CI.
        rig_only: files whose tests all ask for an accelerator.
        leave: pattern of the tests that are never run.
    """

    name: str
    files: dict[str, str]
    quick: dict[str, str]
    rig_only: tuple[str, ...] = ()
    leave: str = ""


# Of 19,000 combinations of an adapter and a small model, those of the adapters that diffusers loads.
_LORA = r"(MLP 1 (LoRA|DoRA)|Conv2d 1 LoRA|Embedding 1 LoRA|Vanilla MLP 1 IA3).*"
_MERGING = r"merg|disable|delete|device_map|low_cpu|save_load|pickle|float16|unload"

LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "accelerate",
            {
                "test_hooks.py": "",
                "test_offload.py": "",
                "test_modeling_utils.py": "",
                "test_big_modeling.py": "",
                "test_quantization.py": "",
            },
            {
                "test_hooks.py": "",
                "test_offload.py": "",
                "test_big_modeling.py": "",
                "test_quantization.py": "",
            },
            ("test_quantization.py",),
            # They fill the free memory of the device, which on the rig is that of the machine.
            leave="tied_weights_memory|test_unhook_memory|memory_with_nested",
        ),
        Library(
            "peft",
            {
                "test_quantization.py": "",
                "test_common_gpu.py": "",
                "test_low_level_api.py": "",
                "test_lora_variants.py": "",
                "test_lora_conversion.py": "",
                "test_mixed.py": "",
                "test_tuners_utils.py": "",
                "test_integrations.py": "",
                "test_other.py": "",
                "test_stablediffusion.py": "",
                "test_initialization.py": "(?i)lora|low_cpu|meta|quant",
                "test_custom_models.py": rf"^(?=.*({_MERGING})).*{_LORA}",
            },
            {
                "test_quantization.py": "(vera|{.boft_block_size.:4).*bnb",
                "test_integrations.py": "TestInitEmptyWeights",
                "test_common_gpu.py": "test_[48]bit_",
                "test_low_level_api.py": "Inject",
            },
            ("test_quantization.py", "test_common_gpu.py"),
        ),
    )
}


def tests_of(name: str, release: str, folder: Path) -> Path:
    """The folder with the tests of a release, from the cache or freshly fetched.

    It is a package called after the library and its release, because PEFT's test files import each other relatively,
    and because the folder of this project's tests is called ``tests`` too.

    Raises:
        CannotInstall: the source distribution cannot be had, or has no tests.
    """
    home = folder / "peers" / f"{name}_{release.replace('.', '_')}"
    with locked(home.with_suffix(".lock")):
        if not (home / "__init__.py").exists():
            _unpack(_fetch(f"{name}=={release}", folder / "peers" / "archives"), home)
    return home


def _fetch(requirement: str, archives: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:",
               "-d", str(archives), requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(archives.glob(requirement.replace("==", "-") + ".tar.gz"))
    if done.returncode or not found:
        last = (done.stderr.strip() or "there is no such file").splitlines()[-1]
        raise CannotInstall(f"cannot fetch the source distribution of {requirement}: {last}")
    return found[0]


def _unpack(archive: Path, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            parts = Path(member.name).parts
            if member.isfile() and parts[1:2] == ("tests",) and len(parts) == 3:
                (home / parts[2]).write_bytes(opened.extractfile(member).read())
    if not any(home.glob("test_*.py")):
        raise CannotInstall(f"{archive.name} has no tests")
    (home / "__init__.py").touch()  # last: it tells a whole folder from an interrupted one
