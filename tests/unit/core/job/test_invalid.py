"""Every way to get a job wrong that we know of, and its error message."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import parse_job

Document = dict[str, Any]
DELETE = object()

VALID: Document = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "MoETrainingJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "nodes": 4,
        "nprocPerNode": 2,
        "parallelism": {"dp": 4, "tp": 2, "ep": 2},
        "model": {"numExperts": 8, "numMoELayers": 2},
        "snapshot": {"interval": {"steps": 1}},
        "redundancy": {"type": "RAIM5", "raim5": {"groupSize": 2}},
        "failurePolicy": {"rules": [{"when": "Any", "action": "RestartInPlace"}]},
        "trainer": {
            "template": {
                "spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}
            }
        },
    },
}
CONTAINER = "spec.trainer.template.spec.containers.0"
SHOWN = "spec.trainer.template.spec.containers[0]"


def put(path: str, value: object) -> Callable[[Document], None]:
    """A change that puts `value` at a dotted path, or deletes what is there."""

    def change(document: Document) -> None:
        *parents, last = path.split(".")
        at: Any = document
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
        if value is DELETE:
            del at[last]
        elif isinstance(at, list):
            at[int(last)] = value
        else:
            at[last] = value

    return change


QUEUE = "metadata.labels.kueue.x-k8s.io/queue-name"


def queued(label: str, scheduling: dict[str, str]) -> Callable[[Document], None]:
    """A change that gives the job a queue by its label, and this scheduling."""

    def change(document: Document) -> None:
        document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": label}
        document["spec"]["scheduling"] = scheduling

    return change


def queued_elsewhere(document: Document) -> None:
    """A change that has another controller make the pods of a job with a queue."""
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "a"}
    document["spec"]["trainer"] = {"external": True}
    document["spec"].pop("failurePolicy", None)


def rule(**fields: object) -> Callable[[Document], None]:
    return put("spec.failurePolicy.rules.0", fields)


CASES = [
    (
        put("apiVersion", DELETE),
        "apiVersion: is required; write apiVersion: holdfast.dev/v1alpha1",
    ),
    (
        put("apiVersion", "holdfast.dev/v1"),
        'apiVersion = "holdfast.dev/v1": not a document that this version reads; '
        "write apiVersion: holdfast.dev/v1alpha1",
    ),
    (
        put("kind", "PyTorchJob"),
        'kind = "PyTorchJob": not a document that this version reads; write kind: MoETrainingJob',
    ),
    (put("extra", 1), "extra = 1: unknown field; the fields here are apiVersion, kind"),
    (
        put("metadata", DELETE),
        "metadata: is required; give a mapping with name, namespace",
    ),
    (
        put("metadata", "tiny"),
        'metadata = "tiny": expected a mapping, got str; give the fields name, namespace, labels',
    ),
    (
        put("metadata.name", DELETE),
        'metadata.name: is required; give the name of the job, for example "llm-8x7b"',
    ),
    (
        put("metadata.name", 7),
        'metadata.name = 7: expected str, got int; give the name of the job, for example "llm-',
    ),
    (
        put("metadata.name", "Tiny_Job"),
        'metadata.name = "Tiny_Job": the job\'s Service cannot have this name; use lower-case l',
    ),
    (
        put("metadata.name", "a.b"),
        'metadata.name = "a.b": the job\'s Service cannot have this name; use lower-case letters',
    ),
    (
        put("metadata.name", "8x7b"),
        'metadata.name = "8x7b": the job\'s Service cannot have this name; use lower-case letters',
    ),
    (
        put("metadata.name", "a\n"),
        r'metadata.name = "a\n": the job'
        "'s Service cannot have this name; use lower-case",
    ),
    (
        put("metadata.name", "a" * 53),
        f'metadata.name = "{"a" * 53}": 53 characters; use at most 52',
    ),
    (
        put("metadata.namespace", "../etc"),
        'metadata.namespace = "../etc": not a DNS-1123 label; use lower-case letters',
    ),
    (
        put("metadata.labels", {"team": 1}),
        'metadata.labels = {"team":1}: expected str, got int at [...]; give the text of each label',
    ),
    (
        put("metadata.lables", {}),
        "metadata.lables = {}: unknown field; did you mean labels?",
    ),
    (put("spec", DELETE), "spec: is required; give a mapping with suspend, nodes"),
    (put("spec", []), "spec = []: expected a mapping, got list; give the fields suspend, nodes"),
    (
        put("spec.nodes", DELETE),
        "spec.nodes: is required; give the number of nodes, for example 4",
    ),
    (
        put("spec.nodes", 0),
        "spec.nodes = 0: expected int >= 1; give the number of nodes, for example 4",
    ),
    (
        put("spec.nodes", "four"),
        'spec.nodes = "four": expected int, got str; give the number of nodes, for example 4',
    ),
    (
        put("spec.nodes", True),
        "spec.nodes = true: expected int, got bool; give the number of nodes, for example 4",
    ),
    (put("spec.node", 4), "spec.node = 4: unknown field; did you mean nodes?"),
    (
        put("spec.nprocpernode", 4),
        "spec.nprocpernode = 4: unknown field; did you mean nprocPerNode?",
    ),
    (
        put("spec.suspend", "no"),
        'spec.suspend = "no": expected bool, got str; give true to suspend the job, or false',
    ),
    (
        put("spec.minNodes", 5),
        "spec.minNodes = 5: more than spec.nodes = 4; use a number from 1 to 4",
    ),
    (
        put("spec.minNodes", 0),
        "spec.minNodes = 0: expected int >= 1; give the smallest number of "
        "nodes to train on, for example 3",
    ),
    (
        put("spec.nprocPerNode", 0),
        "spec.nprocPerNode = 0: expected int >= 1; give the number of processes on each node",
    ),
    (
        put("spec.parallelism", DELETE),
        "spec.parallelism: is required; give a mapping with dp, tp, pp, ep",
    ),
    (
        put("spec.parallelism.dp", DELETE),
        "spec.parallelism.dp: is required; give the degree of data parallelism, for example 4",
    ),
    (
        put("spec.parallelism.dp", 2),
        "spec.parallelism: dp·tp·pp = 4, but nodes·nprocPerNode = 4·2 = 8; make them equal",
    ),
    (
        put("spec.parallelism.pp", 3),
        "spec.parallelism: dp·tp·pp = 24, but nodes·nprocPerNode = 4·2 = 8; make them equal",
    ),
    (
        put("spec.parallelism.ep", 8),
        "spec.parallelism.ep = 8: does not divide dp = 4; use a divisor of it",
    ),
    (
        put("spec.parallelism.cp", 2),
        "spec.parallelism.cp = 2: unknown field; the fields here are dp, tp, pp, ep",
    ),
    (
        put("spec.model.numExperts", 7),
        "spec.model.numExperts = 7: cannot be divided by ep = 2; change spec.parallelism.ep so",
    ),
    (
        put("spec.model.numMoELayers", DELETE),
        "spec.model.numMoELayers: is required; give the number of layers with experts",
    ),
    (
        put("spec.model.numMoeLayers", 2),
        "spec.model.numMoeLayers = 2: unknown field; did you mean numMoELayers?",
    ),
    (
        put("spec.snapshot.policy", {"type": "Partial"}),
        "spec.snapshot.policy.type = \"Partial\": invalid enum value 'Partial'; use one of Full, "
        "PartialExperts, Selective, Sparse",
    ),
    (
        put("spec.snapshot.interval.steps", 0),
        "spec.snapshot.interval.steps = 0: not a number of steps; write auto, or a number "
        "from 1 to 1000000",
    ),
    (
        put("spec.snapshot.interval.steps", "Auto"),
        'spec.snapshot.interval.steps = "Auto": not a number of steps; write auto, or a number '
        "from 1 to 1000000",
    ),
    (
        put("spec.snapshot.compareReplicasEvery", -1),
        "spec.snapshot.compareReplicasEvery = -1: expected int >= 0; give snapshots from one "
        "comparison of replicas to the next, for example 10",
    ),
    (
        put("spec.snapshot.interval.minutes", 5),
        "spec.snapshot.interval.minutes = 5: unknown field; the fields here are steps, "
        "nodeMtbfDays, processMtbfDays",
    ),
    (
        put("spec.snapshot.memoryPerNode", "200GB"),
        'spec.snapshot.memoryPerNode = "200GB": not an amount of memory; write bytes or use Ki',
    ),
    (
        put("spec.snapshot.memoryPerNode", -5),
        "spec.snapshot.memoryPerNode = -5: not an amount of memory; write bytes or use Ki",
    ),
    (
        put("spec.snapshot.memoryPerNode", "0Gi"),
        'spec.snapshot.memoryPerNode = "0Gi": leaves no memory for snapshots; give more, or remove',
    ),
    (
        put("spec.redundancy.type", "RAID5"),
        "spec.redundancy.type = \"RAID5\": invalid enum value 'RAID5'; use one of None, RAIM5",
    ),
    (
        put("spec.redundancy.type", None),
        "spec.redundancy.type = null: expected str, got null; use one of None, RAIM5",
    ),
    (
        put("spec.redundancy.type", "None"),
        "spec.redundancy.raim5: is given, but spec.redundancy.type is None; remove it, or set",
    ),
    (
        put("spec.redundancy", {"type": "RAIM6", "raim6": {"groupSize": 5}}),
        "spec.redundancy.raim6.groupSize = 5: more members than the job's 4 nodes; use a number "
        "from 3 to 4",
    ),
    (
        put("spec.redundancy", {"type": "Replication", "replication": {"replicas": 4}}),
        'spec.redundancy.type = "Replication": 4 losses need more than the job\'s 4 nodes; use at '
        "least 5 nodes, or weaker redundancy",
    ),
    (
        put("spec.redundancy", {"type": "RAIM6", "replication": {}}),
        "spec.redundancy.replication: is given, but spec.redundancy.type is RAIM6; remove it, or "
        "set the type to Replication",
    ),
    (
        put("spec.redundancy.raim5.groupSize", 1),
        "spec.redundancy.raim5.groupSize = 1: expected int >= 2; give the members of a parity gro",
    ),
    (
        put("spec.redundancy.raim5.groupSize", 8),
        "spec.redundancy.raim5.groupSize = 8: more members than the job's 4 nodes; use a number "
        "from 2 to 4",
    ),
    (
        put("spec.redundancy.raim5.spreadTopologyKey", ""),
        'spec.redundancy.raim5.spreadTopologyKey = "": expected str of length >= 1; give the node '
        'label whose values are failure domains, for example "topology.kubernetes.io/rack"',
    ),
    (
        put("spec.redundancy.rami5", {}),
        "spec.redundancy.rami5 = {}: unknown field; did you mean raim5?",
    ),
    (
        put("spec.persistence", {"uri": 3}),
        "spec.persistence.uri = 3: expected str, got int; give the directory or "
        "URI to keep copies in, for example",
    ),
    (
        put("spec.persistence", {"uri": "s3://b", "interval": {"minutes": 0}}),
        "spec.persistence.interval.minutes = 0: expected float > 0.0; give minutes between copies",
    ),
    (
        put("spec.failurePolicy.maxRestarts", -1),
        "spec.failurePolicy.maxRestarts = -1: expected int >= 0; give the number of "
        "restarts allowed",
    ),
    (
        put("spec.failurePolicy.spares", 1.5),
        "spec.failurePolicy.spares = 1.5: expected int, got float; give the number of nodes "
        "to hold",
    ),
    (
        put("spec.failurePolicy.reformSeconds", 0),
        "spec.failurePolicy.reformSeconds = 0: expected float > 0.0; give the seconds that a ",
    ),
    (
        put("spec.failurePolicy.detection.heartbeatSeconds", 0),
        "spec.failurePolicy.detection.heartbeatSeconds = 0: expected float > 0.0; give seconds b",
    ),
    (
        put("spec.failurePolicy.detection.hangSeconds", float("inf")),
        "spec.failurePolicy.detection.hangSeconds = inf: expected float <= 31536000.0; give seco",
    ),
    (
        put("spec.failurePolicy.rules", {"when": "Any"}),
        'spec.failurePolicy.rules = {"when":"Any"}: expected a list, got dict; give a list of ',
    ),
    (
        rule(when="Oom", action="Fail"),
        "spec.failurePolicy.rules[0].when = \"Oom\": invalid enum value 'Oom'; use one of "
        "ExitCode, Hang, Disruption, NodeLost, NoReplacement, Any",
    ),
    (
        rule(when="Any"),
        "spec.failurePolicy.rules[0].action: is required; use one of RestartInPlace, ReplaceNode, ",
    ),
    (
        rule(when="ExitCode", action="Fail"),
        "spec.failurePolicy.rules[0].values = []: when: ExitCode has no exit code; give exit codes",
    ),
    (
        rule(when="NodeLost", action="Fail", values=[1]),
        "spec.failurePolicy.rules[0].values = [1]: when: NodeLost has exit codes; give exit codes ",
    ),
    (
        rule(when="ExitCode", action="Fail", values=[0, 1]),
        "spec.failurePolicy.rules[0].values = [0,1]: expected int >= 1 at [0]; give the exit c",
    ),
    (
        rule(when="ExitCode", action="Fail", values=[1, "x"]),
        'spec.failurePolicy.rules[0].values = [1,"x"]: expected int, got str at [1]; give the exit',
    ),
    (
        rule(when="NodeLost", action="ReplaceNode", afterSeconds=3),
        "spec.failurePolicy.rules[0].afterSeconds = 3.0: when: NodeLost has a waiting time; give",
    ),
    (
        rule(when="NoReplacement", action="Fail", afterSeconds=-1),
        "spec.failurePolicy.rules[0].afterSeconds = -1: expected float >= 0.0; give seconds to wa",
    ),
    (
        put(
            "spec.failurePolicy.rules",
            [{"when": "Any", "action": "Fail"}, {"when": "Hang", "action": "Fail"}],
        ),
        "spec.failurePolicy.rules: when: Any matches everything, so that later rules never",
    ),
    (
        put("spec.failurePolicy.rules", [{"when": "Hang", "action": "Fail"}] * 33),
        "spec.failurePolicy.rules: 33 entries; use at most 32",
    ),
    (
        put("spec.persistence", {"uri": "s3://b", "secretRef": {"name": "creds"}}),
        'spec.persistence.secretRef = {"name":"creds"}: unknown field',
    ),
    (
        put("spec.scheduling.gang", "Slurm"),
        "spec.scheduling.gang = \"Slurm\": invalid enum value 'Slurm'; use one of None, Kueue, "
        "KueuePodGroup, Volcano, Coscheduling",
    ),
    (
        put("spec.scheduling.gang", "KueuePodGroup"),
        "spec.scheduling.queue: gang: KueuePodGroup has no queue; give the name of a LocalQueue",
    ),
    (
        put("spec.scheduling", {"gang": "Kueue"}),
        "spec.scheduling.queue: gang: Kueue has no queue; give the name of a LocalQueue",
    ),
    (
        queued("a", {"gang": "Kueue", "queue": "b"}),
        f'{QUEUE} = "a": another queue than spec.scheduling.queue = b; remove one of the two',
    ),
    (
        queued("a", {"gang": "Volcano"}),
        f'{QUEUE} = "a": queues the job as a whole, and spec.scheduling.gang is Volcano',
    ),
    (
        queued_elsewhere,
        f'{QUEUE} = "a": needs pods that Holdfast makes, and spec.trainer.external is true; queue '
        f"what makes the pods",
    ),
    (queued("Team A", {}), f'{QUEUE} = "Team A": not the name of a LocalQueue'),
    (
        put("metadata.labels", {"kueue.x-k8s.io/prebuilt-workload-name": "w"}),
        'metadata.labels.kueue.x-k8s.io/prebuilt-workload-name = "w": Holdfast makes the Workload',
    ),
    (
        put("spec.scheduling.queue", "team-a"),
        'spec.scheduling.queue = "team-a": gang: None has a queue; remove it, or use gang: Kueue',
    ),
    (
        put("spec.scheduling", {"gang": "Coscheduling", "queue": "team-a"}),
        'spec.scheduling.queue = "team-a": gang: Coscheduling has a queue; remove it, or use gang',
    ),
    (
        put("spec.scheduling", {"gang": "Volcano", "queue": "Team A"}),
        'spec.scheduling.queue = "Team A": not a DNS-1123 subdomain; use lower-case letters',
    ),
    (
        put("spec.managedBy", "holdfast"),
        'spec.managedBy = "holdfast": not a name with a domain; write holdfast.dev/operator, or',
    ),
    (
        put("spec.activeDeadlineSeconds", 0),
        "spec.activeDeadlineSeconds = 0: expected int >= 1; give the seconds that the job may take",
    ),
    (
        put("spec.preRunningDeadlineSeconds", "30m"),
        'spec.preRunningDeadlineSeconds = "30m": expected int | null, got str; give the seconds ',
    ),
    (
        put("spec.ttlSecondsAfterFinished", -1),
        "spec.ttlSecondsAfterFinished = -1: expected int >= 0; give the seconds from the end",
    ),
    (put("spec.trainer", DELETE), "spec.trainer: is required; give a mapping with template"),
    (
        put("spec.trainer.template", DELETE),
        "spec.trainer.template: is required; give a pod template; its first container is the trai",
    ),
    (
        put("spec.trainer.template", "pod.yaml"),
        'spec.trainer.template = "pod.yaml": expected object | null, got str; give a pod template',
    ),
    (
        put("spec.trainer.template.spec", {}),
        "spec.trainer.template.spec.containers: is required; give a list with the trainer",
    ),
    (
        put("spec.trainer.template.spec.containers", []),
        "spec.trainer.template.spec.containers = []: no container; give a list with the trainer",
    ),
    (
        put("spec.trainer.template.spec.containers", ["trainer"]),
        f'{SHOWN} = "trainer": not a container; give a mapping with name, image and command',
    ),
    (
        put(f"{CONTAINER}.command", DELETE),
        "spec.trainer.template.spec.containers: the trainer has no command; give a list of words,",
    ),
    (
        put(f"{CONTAINER}.command", []),
        "spec.trainer.template.spec.containers: the trainer has no command; give a list of words,",
    ),
    (
        put(f"{CONTAINER}.command", "python train.py"),
        f'{SHOWN}.command = "python train.py": not a list of words; give one, for example',
    ),
    (
        put(f"{CONTAINER}.args", ["--steps", 10]),
        f'{SHOWN}.args = ["--steps",10]: not a list of words; give one, for example ["python", '
        '"train.py"], with numbers in quotes',
    ),
    (
        put(f"{CONTAINER}.env", {"SEED": "7"}),
        f'{SHOWN}.env = {{"SEED":"7"}}: not a list; give a list of name and value',
    ),
    (
        put(f"{CONTAINER}.env", [{"name": "1SEED", "value": "7"}]),
        f'{SHOWN}.env[0].name = "1SEED": not the name of an environment variable; use letters',
    ),
    (
        put(f"{CONTAINER}.env", ["SEED=7"]),
        f"{SHOWN}.env[0].name: not the name of an environment variable; use letters",
    ),
    (
        put(f"{CONTAINER}.env", [{"name": "SEED", "value": 7}]),
        f"{SHOWN}.env[0].value = 7: not text; write it in quotes",
    ),
    (
        put(f"{CONTAINER}.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        f'{SHOWN}.env[1].name = "A": is given twice; remove one of the two',
    ),
]


@pytest.mark.parametrize(("change", "expected"), CASES, ids=[case[1][:60] for case in CASES])
def test_what_is_wrong_is_named_with_its_path_and_what_to_do(
    change: Callable[[Document], None], expected: str
) -> None:
    document = deepcopy(VALID)
    change(document)
    with pytest.raises(InvalidJobError) as caught:
        parse_job(document)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith(" is not valid, 1 problem:")
    assert len(lines) == 1
    assert lines[0].startswith(f"  {expected}")


def test_the_document_that_the_cases_change_is_valid() -> None:
    assert parse_job(deepcopy(VALID)).key == "default.tiny"


def test_one_node_cannot_have_parity() -> None:
    document = deepcopy(VALID)
    document["spec"] |= {"nodes": 1, "parallelism": {"dp": 2}}
    with pytest.raises(InvalidJobError, match=r"use redundancy\.type None, or at least 2 nodes"):
        parse_job(document)


def test_what_is_not_a_document_at_all_is_refused() -> None:
    with pytest.raises(
        InvalidJobError, match="the job must be a mapping, not list; give a document"
    ):
        parse_job([])  # type: ignore[arg-type]


def test_all_problems_are_named_at_once() -> None:
    document = deepcopy(VALID)
    document["metadata"]["name"] = "Tiny"
    document["spec"]["nodes"] = 0
    document["spec"]["failurePolicy"]["rules"] = [{"when": "Any", "action": "Fail", "vaules": 1}]
    del document["spec"]["trainer"]["template"]["spec"]["containers"][0]["command"]
    with pytest.raises(InvalidJobError) as caught:
        parse_job(document)
    first, *lines = str(caught.value).splitlines()
    assert first == "job 'Tiny' is not valid, 4 problems:"
    assert [line.split()[0].rstrip(":") for line in lines] == [
        "metadata.name",
        "spec.nodes",
        "spec.failurePolicy.rules[0].vaules",
        "spec.trainer.template.spec.containers",
    ]


def test_contradictions_between_fields_are_named_together() -> None:
    document = deepcopy(VALID)
    document["spec"]["parallelism"] = {"dp": 3, "ep": 2}
    document["spec"]["model"]["numExperts"] = 3
    document["spec"]["minNodes"] = 9
    with pytest.raises(InvalidJobError, match="4 problems") as caught:
        parse_job(document)
    for path in ("spec.parallelism:", "spec.parallelism.ep", "spec.model", "spec.minNodes"):
        assert f"\n  {path}" in str(caught.value)
