"""Every reason that Kubernetes gives for the end of a pod, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
from samples import make_job

from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.pods.manifests import TrainerVolume, pod_manifest
from holdfast_operator.kube.pods.pod_reasons import TAKEN_AWAY
from holdfast_operator.kube.pods.pods import TrainerPod, read_pod
from holdfast_operator.reconciler.observe.text import exit_in_words
from holdfast_operator.reconciler.observe.views import AgentState

CONDITIONS = (
    "PreemptionByScheduler",
    "DeletionByTaintManager",
    "EvictionByEvictionAPI",
    "DeletionByPodGC",
    "TerminationByKubelet",
)
BY_KUBELET = (
    *("Evicted", "Preempting", "NodeShutdown", "Shutdown", "Terminated", "NodeLost"),
    *("NodeAffinity", "NodeNotReady", "UnexpectedAdmissionError", "ResourceUnavailable"),
    *("TopologyAffinityError", "SMTAlignmentError"),
    *("OutOfcpu", "OutOfmemory", "OutOfpods", "OutOfephemeral-storage"),
    *("OutOfhugepages-2Mi", "OutOfhugepages-1Gi"),
)


def seen(status: Object, **spec: Any) -> TrainerPod:
    raw: Object = pod_manifest(make_job(), 0, "n0", 1, TrainerVolume.CSI)
    raw["metadata"]["uid"] = "u"
    raw["spec"] |= spec
    raw["status"] = status
    found = read_pod(raw)
    assert found is not None
    return found


def ended(code: int, reason: str, **more: Any) -> list[Object]:
    state = {"terminated": {"exitCode": code, "reason": reason, **more}}
    return [{"name": "trainer", "state": state}]


def words(found: TrainerPod) -> str:
    assert found.exit_code is not None
    return exit_in_words(found.exit_code, found.reason, found.message)


def test_the_table_has_every_reason_of_the_cluster() -> None:
    assert set(TAKEN_AWAY) == {*CONDITIONS, *BY_KUBELET}


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        (1, "Error", "exited with code 1"),
        (137, "Error", "was killed by SIGKILL (code 137)"),
        (137, "OOMKilled", "was killed for lack of memory (OOMKilled, code 137)"),
        (
            1,
            "OOMKilled",
            "exited with code 1, after a process beside it was killed for lack of memory "
            "(OOMKilled)",
        ),
        (128, "StartError", "ended: StartError (code 128)"),
        (127, "ContainerCannotRun", "ended: ContainerCannotRun (code 127)"),
        (137, "ContainerStatusUnknown", "ended: ContainerStatusUnknown (code 137)"),
    ],
)
def test_the_reason_of_the_container_is_kept(code: int, reason: str, text: str) -> None:
    found = seen({"phase": "Failed", "containerStatuses": ended(code, reason)})
    assert (found.state, found.exit_code, words(found)) == (AgentState.EXITED, code, text)
    assert found.disruption == ""


def test_a_container_that_finished_has_no_reason_whatever_was_killed_in_it() -> None:
    found = seen({"phase": "Succeeded", "containerStatuses": ended(0, "OOMKilled")})
    assert (found.state, found.exit_code, found.reason) == (AgentState.EXITED, 0, "")


@pytest.mark.parametrize("reason", BY_KUBELET)
@pytest.mark.parametrize("containers", [[], ended(137, "Error"), ended(143, "Error")])
def test_a_pod_that_the_kubelet_ended_or_refused_was_taken_away(
    reason: str, containers: list[Object]
) -> None:
    status = {
        "phase": "Failed",
        "reason": reason,
        "message": "why.",
        "containerStatuses": containers,
    }
    found = seen(status)
    assert (found.reason, found.message, found.disruption) == (reason, "why.", f"{reason}: why.")
    code = containers[0]["state"]["terminated"]["exitCode"] if containers else 137
    assert found.exit_code == code and words(found) == f"ended: {reason}: why. (code {code})"
    del status["message"]
    assert seen(status).disruption == f"{reason}: {TAKEN_AWAY[reason]}"


def test_a_resource_of_the_cluster_that_has_no_room_is_known_by_its_beginning() -> None:
    status = {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Node has 0 left"}
    assert seen(status).disruption == "OutOfnvidia.com/gpu: Node has 0 left"


@pytest.mark.parametrize("reason", CONDITIONS)
@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_the_condition_of_a_disruption_is_kept_with_its_message(reason: str, phase: str) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    assert seen({"phase": phase, "conditions": [condition]}).disruption == (
        f"{reason}: {TAKEN_AWAY[reason]}"
    )
    condition["message"] = "in order to admit prod/web"
    assert seen({"phase": phase, "conditions": [condition]}).disruption == (
        f"{reason}: in order to admit prod/web"
    )
    condition["status"] = "False"
    assert seen({"phase": phase, "conditions": [condition]}).disruption == ""


def test_what_the_pod_says_of_its_eviction_comes_before_the_condition() -> None:
    found = seen(
        {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "The node was low on resource: memory.",
            "conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
            ],
            "containerStatuses": ended(137, "Error"),
        }
    )
    assert found.disruption == "Evicted: The node was low on resource: memory."


def test_a_deadline_of_the_template_is_a_failure_with_its_reason() -> None:
    message = "Pod was active on the node longer than the specified deadline"
    found = seen(
        {
            "phase": "Failed",
            "reason": "DeadlineExceeded",
            "message": message,
            "containerStatuses": ended(143, "Error"),
        }
    )
    assert found.disruption == ""
    assert words(found) == f"ended: DeadlineExceeded: {message} (code 143)"


INIT = [{"name": "fetch", "image": "a"}, {"name": "proxy", "image": "a", "restartPolicy": "Always"}]


def of_init(name: str, code: int, reason: str = "Error") -> Object:
    written = "cannot fetch dataset\n"
    state = {"terminated": {"exitCode": code, "reason": reason, "message": written}}
    return {"name": name, "state": state}


WAITS = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}


@pytest.mark.parametrize("containers", [[], [WAITS]])
def test_a_failed_init_container_is_named_with_its_code_and_lines(containers: list[Object]) -> None:
    status = {
        "phase": "Failed",
        "initContainerStatuses": [of_init("fetch", 3)],
        "containerStatuses": containers,
    }
    found = seen(status, initContainers=INIT)
    assert (found.state, found.exit_code) == (AgentState.EXITED, 3)
    assert words(found) == "was not started: init container fetch exited with code 3"
    assert found.last_lines == "cannot fetch dataset"
    status["initContainerStatuses"] = [of_init("fetch", 137, "OOMKilled")]
    assert words(seen(status, initContainers=INIT)) == (
        "was not started: init container fetch exited with code 137 (OOMKilled)"
    )


def test_a_sidecar_that_ended_is_no_failed_init_container() -> None:
    status = {
        "phase": "Failed",
        "initContainerStatuses": [of_init("fetch", 0), of_init("proxy", 143)],
        "containerStatuses": ended(5, "Error"),
    }
    assert seen(status, initContainers=INIT).exit_code == 5
    status["containerStatuses"] = []
    assert seen(status, initContainers=INIT).exit_code == 137


def test_init_containers_keep_the_end_of_their_log_for_the_status() -> None:
    made = pod_manifest(make_job({"initContainers": INIT[:1]}), 0, "n0", 1, TrainerVolume.CSI)
    assert made["spec"]["initContainers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
