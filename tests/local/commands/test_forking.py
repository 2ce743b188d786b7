"""What ranks and daemons find imported when they begin: importing it takes far longer than the rest
of their start."""

from __future__ import annotations

import multiprocessing

import pytest
from daemons import warm_up
from ranks import run_ranks

FIND = """
import sys
if {modules} - sys.modules.keys():
    raise RuntimeError("not imported")
"""


def find(rank: int, modules: set[str]) -> None:
    exec(FIND.format(modules=modules))


@pytest.mark.timeout(300)
def test_ranks_find_torch_and_daemons_that_are_forked_after_them_the_daemon() -> None:
    run_ranks(find, ({"torch._dynamo"},), 1)
    with pytest.raises(AssertionError, match="RuntimeError: not imported"):
        run_ranks(find, ({"no_such_module"},), 1)
    warm_up()
    # A function of this module would import, with the module, all that it imports.
    find_daemon = FIND.format(modules={"holdfast_daemon.__main__"})
    forking = multiprocessing.get_context("forkserver")
    process = forking.Process(target=exec, args=(find_daemon,))
    process.start()
    process.join()
    assert process.exitcode == 0
