from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import _environment
from holdfast._environment import read_environment
from holdfast._job_settings import JobSettings
from holdfast._settings import Settings
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.schema import SETTINGS
from holdfast_core.job.snapshots import (
    ExpertBudget,
    Full,
    PartialExperts,
    Policy,
    Selective,
    SparseWindows,
)

PUBLIC_MODULES = {
    *("testing", "rendezvous", "launch", "moe", "dcp", "elastic", "export", "integrations"),
    "node_checks",
}


def test_everything_public_is_in_the_package_itself() -> None:
    assert holdfast.__all__ == sorted(holdfast.__all__)
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)
    modules = {module.name for module in pkgutil.iter_modules(holdfast.__path__)}
    assert {name for name in modules if not name.startswith("_")} == PUBLIC_MODULES
    here = {name for name in vars(holdfast) if not name.startswith("_")}
    assert here - set(holdfast.__all__) <= PUBLIC_MODULES


def test_importing_it_imports_nothing_that_a_trainer_may_not_use() -> None:
    """Each of these takes about a second, in every new process of a recovery."""
    heavy = {
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
    }
    program = (
        "import sys, torch; before = set(sys.modules); import holdfast, holdfast.elastic; "
        "print(*(sys.modules.keys() - before))"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    imported = set(output.stdout.decode().split())
    assert "holdfast.elastic" in imported
    frameworks = {"transformers", "accelerate", "lightning", "pandas", "matplotlib"}
    assert imported.isdisjoint(heavy | frameworks)


def test_the_environment_has_the_rank_and_the_daemons_socket() -> None:
    found = read_environment(
        {
            "HOLDFAST_SOCKET": "/run/holdfast/daemon.sock",
            "HOLDFAST_JOB": "moe",
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "HOLDFAST_COPY_THREADS": "4",
        }
    )
    assert found.socket == Path("/run/holdfast/daemon.sock")
    assert (found.job, found.rank, found.world_size, found.local_rank) == ("moe", 3, 8, 1)
    assert (found.store_address, found.copy_threads) == ("node0:29500", 4)


def test_an_empty_environment_is_one_unprotected_rank() -> None:
    found = read_environment({})
    assert (found.socket, found.rank, found.world_size, found.copy_threads) == (None, 0, 1, None)


@pytest.mark.parametrize(
    "variables", [{"RANK": "one"}, {"WORLD_SIZE": "-1"}, {"HOLDFAST_SOCKET": "/x"}]
)
def test_a_broken_environment_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(InvalidJobError):
        read_environment(variables)


def test_no_setting_of_a_job_takes_the_name_of_another() -> None:
    """A subclass would take its place without a word."""
    assert JobSettings.__annotations__.keys().isdisjoint(Settings.__annotations__)
    assert {setting.name for setting in SETTINGS} == set(JobSettings.__annotations__)
    source = Path(_environment.__file__).read_text(encoding="utf-8")
    assert {setting.variable for setting in SETTINGS}.isdisjoint(re.findall(r"[A-Z_]{4,}", source))


def test_settings_validate_themselves() -> None:
    for wrong in ({"copy_threads": 0}, {"nan_check_every": -1}, {"start_wait_s": -1.0}):
        with pytest.raises(InvalidJobError, match=next(iter(wrong))):
            holdfast.Settings(**wrong)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (SparseWindows(window=0), "policy.window = 0: not a number of steps; write auto"),
        (PartialExperts(loss_limit=1.5), "policy.lossLimit = 1.5: expected float <= 1.0; give the"),
        (Selective(experts=2, budget=ExpertBudget()), "policy.budget: is given, but spec.snapshot"),
        (Selective(experts=2), ""),
        (Full(), ""),
    ],
)
def test_a_policy_of_a_script_is_checked_as_one_of_a_job(policy: Policy, message: str) -> None:
    if not message:
        assert Settings(policy=policy).policy is policy
        return
    with pytest.raises(InvalidJobError) as caught:
        Settings(policy=policy)
    assert message in str(caught.value)
