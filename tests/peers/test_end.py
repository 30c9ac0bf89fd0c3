"""The command ends with everything that it started."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

# As the command does: two processes, started and waited for in threads, each of which starts another.
PROGRAM = """
import subprocess, sys, threading
from tests.peers.__main__ import end_with_children
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
end_with_children()
threads = [threading.Thread(target=subprocess.run, args=([sys.executable, "-c", CHILD],)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_that_was_started(number) -> None:
    command = subprocess.Popen([sys.executable, "-c", PROGRAM])
    started: list[psutil.Process] = []
    while command.poll() is None and len(started) < 4:
        started = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(number)
    assert command.wait() == -number
    assert len(started) == 4 and not psutil.wait_procs(started, timeout=30)[1]
