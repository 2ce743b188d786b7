"""References to variables, as the kubelet resolves them."""

from __future__ import annotations

import time

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.references import CHARACTERS_MAX, resolve, resolve_env, resolve_words

KNOWN = {"A": "a", "B": "$(A)", "EMPTY": "", "LONG_NAME": "long", "$$": "odd"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The cases of Kubernetes' own test of its expansion.
        ("$(A)", "a"),
        ("___$(A)___", "___a___"),
        ("$(A)-$(LONG_NAME)", "a-long"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$a"),
        ("$$$$(A)", "$$(A)"),
        ("$$$$$(A)", "$$a"),
        ("$(A)$(A)", "aa"),
        ("$(EMPTY)x", "x"),
        ("$(B)", "$(A)"),  # what a reference gives is not looked at again
        ("$A $B", "$A $B"),
        ("${A}", "${A}"),
        ("$", "$"),
        ("$$", "$"),
        ("$$$", "$$"),
        ("cost: 5$", "cost: 5$"),
        ("$(", "$("),
        ("$(A", "$(A"),
        ("$(A$$", "$(A$"),
        ("$(A$(A)", "$(A$(A)"),
        ("$($(A))", "$($(A))"),
        ("$(A)$(", "a$("),
        ("$()", "$()"),
        ("$($$)", "odd"),
        ("$é$(A)", "$éa"),
        ("", ""),
    ],
)
def test_a_text_is_resolved_as_the_kubelet_does(text: str, expected: str) -> None:
    assert resolve(text, KNOWN) == expected


def test_a_variable_refers_to_those_before_it() -> None:
    entries: list[dict[str, object]] = [
        {"name": "ROOT", "value": "/data"},
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "$(ROOT)/late"},
        {"name": "SELF", "value": "$(SELF)x"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "USES", "value": "$(POD) $(LATE) $$(ROOT)"},
        {"name": "NONE"},
    ]
    assert resolve_env(entries) == {
        "ROOT": "/data",
        "EARLY": "$(LATE)",
        "LATE": "/data/late",
        "SELF": "$(SELF)x",
        "USES": "$(POD) /data/late $(ROOT)",
        "NONE": "",
    }


def test_variables_that_repeat_each_other_are_refused_before_they_fill_memory() -> None:
    laughs = [{"name": "A0", "value": "x" * 10}]
    laughs += [{"name": f"A{i + 1}", "value": f"$(A{i})" * 10} for i in range(40)]
    with pytest.raises(InvalidJobError, match="look for variables that repeat each other"):
        resolve_env(laughs)
    long = {"A": "x" * (CHARACTERS_MAX // 4)}
    assert len(resolve_words(["$(A)"] * 4, long)) == 4
    with pytest.raises(InvalidJobError, match="command and args"):
        resolve_words(["$(A)"] * 5, long)
    with pytest.raises(InvalidJobError, match="variables resolved"):
        resolve("$(A)" * 5, long)


@pytest.mark.parametrize("text", ["$(", "$", "$$", "$(a)", "$(A", "$a", ")"])
def test_the_time_of_resolving_grows_with_the_text(text: str) -> None:
    began = time.thread_time()
    resolve(text * (CHARACTERS_MAX // 8), {})
    assert time.thread_time() - began < 3
