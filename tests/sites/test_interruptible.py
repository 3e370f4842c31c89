"""A site and a server end when they are asked to, wherever they are then."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOST = """
import os, signal, threading, time
from fedstrata.sites import interruptible

interruptible.AGAIN_SECONDS = 0.2

class Call:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(1000):  # the handler runs here, and what it raises is discarded
            pass

before = signal.getsignal(signal.SIGALRM)
stop = threading.Event()
with interruptible.interruptible(stop):
    try:
        call = Call()
        del call
        print("goes on")
        time.sleep(20)
        print("never ends")
    finally:
        stop.set()
        time.sleep(0.5)  # what is done at the end is not interrupted
        print("ends")
assert signal.getsignal(signal.SIGALRM) == before
assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_that_python_discards_is_raised_again(name: str) -> None:
    found = subprocess.run([sys.executable, "-c", LOST.format(name=name)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[:-1] == ["goes on", "ends"]


def test_a_site_under_nohup_outlives_its_terminal() -> None:
    code = LOST.format(name="SIGHUP").replace("sleep(20)", "sleep(0.5)").replace("never ends", "is still there")
    command = ["nohup", sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[:-1] == ["goes on", "is still there", "ends"]
