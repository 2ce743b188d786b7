"""The trainers' pods as the API server knows them, followed by `kubectl get --watch`."""

from __future__ import annotations

import codecs
import json
import subprocess
import threading
from collections.abc import Sequence
from typing import IO, Any, Self

from holdfast_operator.kube.manifests import TRAINER_SELECTOR
from holdfast_operator.kube.pods import TrainerPod, read_pod

CHUNK_BYTES = 1 << 16


class PodWatch:
    """A context manager that follows pods on a thread.

    Args:
        kubectl: the command, with a namespace.
    """

    def __init__(self, kubectl: Sequence[str]) -> None:
        self._command = [*kubectl, "get", "pods", "-l", TRAINER_SELECTOR, "-o", "json"]
        self._command += ["--watch", "--output-watch-events"]
        self._pods: dict[str, TrainerPod] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        arguments = (self._process.stdout,)
        self._thread = threading.Thread(target=self._follow, args=arguments, name="pods")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def of(self, job: str) -> list[TrainerPod]:
        """The pods of a job, given by its key."""
        with self._lock:
            return [pod for pod in self._pods.values() if pod.job_key == job]

    def _follow(self, output: IO[bytes]) -> None:
        text, decoder = "", json.JSONDecoder()
        characters = codecs.getincrementaldecoder("utf-8")()
        with output:
            while chunk := output.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
                text += characters.decode(chunk)
                while text:
                    try:
                        event, end = decoder.raw_decode(text)
                    except json.JSONDecodeError:
                        break  # the rest of it is still to come
                    self._take(event)
                    text = text[end:].lstrip()

    def _take(self, event: dict[str, Any]) -> None:
        name, pod = event["object"]["metadata"]["name"], read_pod(event["object"])
        with self._lock:
            self._pods.pop(name, None)
            if pod is not None and event["type"] != "DELETED":
                self._pods[name] = pod
