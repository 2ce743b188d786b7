"""The first decoding of a type, in many threads at once: it must not crash the process."""

from __future__ import annotations

import subprocess
import sys

_TRIES = 12
_SCRIPT = f"""
import os, sys, threading
from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.layouts import decode_layout

def decode(start):
    start.wait()
    for _ in range(20):
        try:
            decode_layout(b'{{"rank": 1, "entries": [{{"unit": "a"}}]}}')
        except HoldfastError:
            pass

crashed = 0
for _ in range({_TRIES}):
    child = os.fork()
    if not child:
        sys.setswitchinterval(1e-6)
        start = threading.Barrier(6)
        threads = [threading.Thread(target=decode, args=(start,)) for _ in range(start.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    crashed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(crashed)
"""


def test_many_threads_may_be_the_first_to_decode() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "0"
