"""quanto-extension-lock: a compile that was killed blocks every later program."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from diffusers_quantfix.fixes.quanto import extension_lock
from tests.fixes import quanto_models as q
from tests.gate import unmet

FIX_ID = "quanto-extension-lock"
LOCK_FILE = pytest.mark.skipif(
    bool(unmet("torch<2.14")), reason="the lock of torch 2.14 is one of the operating system"
)


@pytest.fixture
def build(monkeypatch, tmp_path):
    """A build folder of its own for the CPU extension, which has not been loaded yet."""
    q.quanto()
    from optimum.quanto.library.extensions import cpp

    folder = tmp_path / "build"
    folder.mkdir()
    monkeypatch.setattr(cpp.ext, "build_directory", str(folder))
    for name in ("_lib", "_quantfix_stand_in"):
        monkeypatch.setitem(vars(cpp.ext), name, None)
    monkeypatch.setattr(extension_lock, "QUIET", 1.0)
    return folder


def ends(work, lock, seconds: float = 20.0) -> list[object]:
    """What ``work`` returned or raised; an assertion when it still waits for ``lock``.

    A compile, which writes its files beside the lock, may take a minute or more.
    """
    found: list[object] = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    for _ in range(600):
        if thread.is_alive() and len(os.listdir(lock.parent)) > 1:
            thread.join(1.0)
    waits = thread.is_alive()
    if waits:
        lock.unlink(missing_ok=True)
        thread.join(seconds)
    assert not waits, "waits for ever"
    return found


def aged(folder, seconds: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.defect(FIX_ID, shows="waits for ever")
def test_a_lock_that_nobody_deletes(build, monkeypatch):
    monkeypatch.setattr(extension_lock, "QUIET", 0.25)  # a twentieth of the time that `ends` gives
    (build / "lock").touch()
    (found,) = ends(lambda: q.run(q.layers("qint4")), build / "lock", 5.0)
    assert q.error(found, q.run(q.plain_layers())) < q.TOLERANCE["int4"]
    assert (build / "lock").exists(), "it may be that of a compile that is under way"


def test_a_lock_of_the_operating_system_is_healthy(monkeypatch):
    q.quanto()
    from optimum.quanto.library.extensions import extension
    from torch.utils import cpp_extension

    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)  # as in torch 2.14
    assert not extension_lock.broken(extension)


@LOCK_FILE
def test_the_warning_names_the_file(build, caplog):
    (build / "lock").touch()
    with caplog.at_level(logging.INFO, "diffusers_quantfix"):
        ends(lambda: q.run(q.layers("qint4")), build / "lock")
    waiting, fallback = (record.getMessage() for record in caplog.records)
    assert waiting == f"waiting for the process that compiles in {build}"
    assert f"delete {build / 'lock'}" in fallback and "PyTorch unpacks" in fallback


@LOCK_FILE
def test_a_compile_that_goes_on_is_waited_for(build):
    """The folder changes now and then; in the end the lock goes."""
    from optimum.quanto.library.extensions import extension

    lock = build / "lock"
    lock.touch()

    def compile_slowly():
        for step in range(5):
            time.sleep(0.6)
            (build / f"{step}.o").touch()
        lock.unlink()

    other = threading.Thread(target=compile_slowly)
    start = time.monotonic()
    other.start()
    (found,) = ends(
        lambda: extension.load(name="quanto_none", sources=[], build_directory=str(build)), lock, 60.0
    )
    other.join()
    assert time.monotonic() - start >= 3.0
    assert isinstance(found, ImportError), "the wait ended, and there is nothing to load"


@LOCK_FILE
def test_other_extensions_wait_as_ever(build, tmp_path):
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "lock"
    lock.touch()
    threading.Timer(2.5, lock.unlink).start()
    assert ends(FileBaton(str(lock)).wait, lock) == [None]
    assert not lock.exists()


@pytest.mark.parametrize(("age", "deleted"), [(60, False), (29 * 60, False), (31 * 60, True), (1e6, True)])
def test_a_lock_of_long_ago_is_deleted(build, caplog, age, deleted):
    (build / "lock").touch()
    (build / "unpack.o").touch()
    aged(build, age)
    extension_lock.delete_if_abandoned(str(build / "lock"))
    assert {path.name for path in build.iterdir()} == ({"unpack.o"} if deleted else {"lock", "unpack.o"})
    assert bool(caplog.records) == deleted


def test_an_old_lock_beside_new_files_stays(build):
    (build / "lock").touch()
    aged(build, 1e6)
    (build / "unpack.o").touch()
    extension_lock.delete_if_abandoned(str(build / "lock"))
    assert (build / "lock").exists()


def test_the_new_lock_of_a_faster_process_stays(build, monkeypatch):
    """Both have seen the old lock; the other one deletes it and creates its own before we come to it."""
    lock = build / "lock"
    lock.touch()
    aged(build, 1e6)
    rename = os.rename

    def late(source, target):
        lock.unlink()
        lock.write_text("new")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    extension_lock.delete_if_abandoned(str(lock))
    assert lock.read_text() == "new"
    assert [path.name for path in build.iterdir()] == ["lock"]


def test_a_folder_that_nobody_can_write_to(build, monkeypatch):
    (build / "lock").touch()
    aged(build, 1e6)

    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    (found,) = ends(lambda: q.run(q.layers("qint4")), build / "lock")
    assert q.error(found, q.run(q.plain_layers())) < q.TOLERANCE["int4"]


COMPILE = """
import sys, diffusers_quantfix
from diffusers_quantfix.fixes.quanto import extension_lock
extension_lock.QUIET = float(sys.argv[2])
from optimum.quanto.library.extensions import cpp
cpp.ext.build_directory, cpp.ext.sources = sys.argv[1], [sys.argv[3]]
print(type(cpp.ext.lib).__name__, flush=True)
"""

# A module without a header of torch, which takes a minute to read.
SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "quanto_cpp", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_quanto_cpp() { return PyModule_Create(&module); }
"""
COMPILER = """#!/bin/sh
case "$*" in *module.cpp*) sleep 4;; esac
exec c++ "$@"
"""


def compiling(folder, quiet: float) -> subprocess.Popen[str]:
    source, compiler = folder.parent / "module.cpp", folder.parent / "c++"
    source.write_text(SOURCE)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", COMPILE, str(folder), str(quiet), str(source)],
        env={**os.environ, "CXX": str(compiler)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="nothing can be compiled here"
)
def test_real_compiles_killed_and_at_the_same_time(tmp_path):
    """One is killed; a second one does without; a third one, long after, compiles, and a fourth one waits for it."""
    q.quanto()
    folder, lock = tmp_path / "build", tmp_path / "build" / "lock"
    killed = compiling(folder, 45.0)
    while not lock.exists() and killed.poll() is None:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    said, log = killed.communicate()
    assert not said and lock.exists(), log

    said, log = compiling(folder, 2.0).communicate(timeout=300)
    assert said == "StandIn\n", log
    assert f"delete {lock}" in log

    aged(folder, 31 * 60)
    left = lock.stat().st_mtime_ns
    third = compiling(folder, 45.0)
    while (not lock.exists() or lock.stat().st_mtime_ns == left) and third.poll() is None:
        time.sleep(0.05)
    fourth = compiling(folder, 45.0)
    for process in (third, fourth):
        said, log = process.communicate(timeout=300)
        assert said == "module\n", log
    assert not lock.exists()
