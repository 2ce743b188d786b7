"""Settings of trainers: from a document through environment variables to their values."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import pytest
from msgspec import Meta

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import Document
from holdfast_core.job.settings import read_variables, settings_of, variables_of

SETTING = {"setting": True}


class Word(StrEnum):
    ONE = "One"
    OTHER = "Other"


class Inner(Document, frozen=True, kw_only=True):
    flag: Annotated[bool, Meta(extra=SETTING)] = True
    word: Annotated[Word, Meta(extra=SETTING)] = Word.ONE
    silent: int = 3


class Part(Document, frozen=True, kw_only=True):
    whole_number: Annotated[int, Meta(ge=0, extra=SETTING, description="a number")] = 10
    inner: Inner = Inner()
    rate: Annotated[float, Meta(gt=0, extra=SETTING)] | None = None
    text: Annotated[str, Meta(max_length=5, extra=SETTING)] = ""


SETTINGS = settings_of(Part)


def test_each_has_the_path_of_the_document_and_a_variable_of_its_name() -> None:
    assert [(setting.path, setting.variable) for setting in SETTINGS] == [
        ("wholeNumber", "HOLDFAST_WHOLE_NUMBER"),
        ("inner.flag", "HOLDFAST_FLAG"),
        ("inner.word", "HOLDFAST_WORD"),
        ("rate", "HOLDFAST_RATE"),
        ("text", "HOLDFAST_TEXT"),
    ]


@pytest.mark.parametrize(
    ("part", "variables"),
    [
        (Part(), {}),
        (Part(whole_number=0), {"HOLDFAST_WHOLE_NUMBER": "0"}),
        (Part(inner=Inner(flag=False)), {"HOLDFAST_FLAG": "0"}),
        (Part(inner=Inner(word=Word.OTHER)), {"HOLDFAST_WORD": "Other"}),
        (Part(rate=0.1 + 0.2), {"HOLDFAST_RATE": "0.30000000000000004"}),
        (Part(text="12"), {"HOLDFAST_TEXT": "12"}),
    ],
)
def test_what_is_not_the_default_is_read_back_from_its_variable(
    part: Part, variables: dict[str, str]
) -> None:
    assert variables_of(SETTINGS, part) == variables
    assert read_variables(SETTINGS, variables) == {
        setting.name: setting.value_in(part) for setting in SETTINGS
    }


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOLDFAST_WHOLE_NUMBER": "-1"}, "HOLDFAST_WHOLE_NUMBER='-1': expected int >= 0; give a"),
        ({"HOLDFAST_FLAG": "maybe"}, "HOLDFAST_FLAG='maybe': "),
        ({"HOLDFAST_WORD": "Two"}, "HOLDFAST_WORD='Two': invalid enum value 'Two'; use one of One"),
        ({"HOLDFAST_TEXT": "longer"}, "HOLDFAST_TEXT='longer': expected str of length <= 5"),
    ],
)
def test_a_variable_that_says_no_value_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidJobError) as caught:
        read_variables(SETTINGS, variables)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [True, "3", 3.5])
def test_a_script_gives_a_value_of_the_type(value: Any) -> None:
    (number, *_) = SETTINGS
    number.check(3)
    with pytest.raises(InvalidJobError, match=r"whole_number=.*: expected int, got"):
        number.check(value)
