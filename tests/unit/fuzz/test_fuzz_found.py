"""What the fuzzers found, byte for byte."""

from __future__ import annotations

import math

import fuzzing_seeds as seeds
import pytest
from fuzzing_targets import TARGETS, attempt

from holdfast_protos import trainer_pb2

_DEEP = b'{"x":' + b"[" * 20_000
_FOUND = {
    "no pieces": ("manifest", seeds.manifests()[0].replace(b":4096", b":0")),
    "deep manifest": ("manifest", _DEEP),
    "deep layout": ("layout", _DEEP),
    "deep parity entry": ("parity-entry", _DEEP),
    "deep epoch": ("epoch-file", _DEEP),
    "deep review": ("token-review", _DEEP),
    "deep claims": ("token-claims", _DEEP),
    "late claims": ("token-claims", b'{"exp":' + b"9" * 400 + b"}"),
    "half a character": ("redis-record", b'loss\n{"\\ud800":1}'),
    "long number": ("text", b"layer" + b"9" * 5000 + b"/gate"),
    "dtype of code": ("extras", b"\x94\xa1a\xa1,\x91\x01\xc4\x01x"),
    "empty elements": ("extras", b"\x94\xa1a\xa3|S0\x91\xce\x3b\x9a\xca\x00\xc4\x00"),
    "wait of nan": (
        "trainer-request",
        b"\x06"
        + trainer_pb2.JoinWorldRequest(
            protocol_version=1, job=seeds.JOB, after_epoch=9, wait_s=math.nan
        ).SerializeToString(),
    ),
    "long words": (
        "trainer-request",
        b"\x05" + trainer_pb2.ProgressReport(session="s", failure="x" * 2**21).SerializeToString(),
    ),
    "long code": (
        "trainer-request",
        b"\x05"
        + trainer_pb2.ProgressReport(
            session="s", failure="x", failure_code="y" * 2**20
        ).SerializeToString(),
    ),
    "long epoch in a manifest": (
        "kept-manifest",
        seeds.manifests()[0].replace(b'"epoch":', b'"epoch":' + b"9" * 300),
    ),
    "path in a manifest": (
        "kept-manifest",
        seeds.manifests()[0].replace(seeds.MANIFEST.layout_id.encode(), b"../../../x"),
    ),
}


@pytest.mark.parametrize("found", _FOUND)
def test_what_was_found_is_read_or_refused(found: str) -> None:
    name, data = _FOUND[found]
    (target,) = (target for target in TARGETS if target.name == name)
    target.seeds()  # imports what the parser is made of: not what the bytes cost
    attempt(target, data)
