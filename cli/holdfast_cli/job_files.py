"""Reads job files: YAML from untrusted sources, in bounded memory and time.

A few bytes of YAML can stand for very much: an alias repeats what it names, and aliases of aliases
can expand beyond memory. So the events of the text are counted first, each alias with the size of
its target, and only a document of ordinary size is loaded.

A single number can be expensive, too. Reading a number in base 60 takes time that grows with the
square of its length, and keys beyond 64 bits can be chosen so that all of them collide in a hash
table. So numbers are bounded before they are read, and only values that JSON has are read at all:
numbers in base 60 and dates are text, as they are for Kubernetes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import yaml

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.documents import DEPTH_MAX, INTEGERS, VALUES_MAX
from holdfast_core.job.parsing import MoETrainingJob, parse_job

FILE_BYTES_MAX = 1 << 20
"""Largest object that etcd accepts: a larger job could never be sent to a cluster."""

NUMBER_CHARACTERS_MAX = 80
"""Longest number. The longest of 64 bits, in binary, has 67 characters."""

_MESSAGE_CHARACTERS_MAX = 500
"""Characters of an error of YAML that are shown: it may repeat a name of any length."""

_TAG = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")


def load_job(path: Path) -> MoETrainingJob:
    """Read the job in a YAML (or JSON) file.

    Raises:
        InvalidJobError: when it cannot be read, or is no valid job.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidJobError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return parse_job(read_document(data))
    except InvalidJobError as error:
        raise InvalidJobError(f"{path}: {error}") from error


def read_document(data: bytes) -> Any:
    """Read the plain values of a YAML document that holds one job.

    Raises:
        InvalidJobError: when it is not YAML, or larger than a job can be.
    """
    if len(data) > FILE_BYTES_MAX:
        raise InvalidJobError(
            f"the file has more than {FILE_BYTES_MAX} bytes; no job needs that many"
        )
    try:
        text = data.decode()
        _count(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        shown = str(error)[:_MESSAGE_CHARACTERS_MAX]
        raise InvalidJobError(f"the file is not YAML: {shown}") from error


class _Loader(yaml.SafeLoader):
    """Loader of the values that JSON has, in time that grows with the length of the text.

    It refuses a duplicate key in a mapping; YAML's own loader takes the last one.
    """

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in _KINDS
    }
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {  # type: ignore[misc]
        first: [each for each in resolvers if each[0] != f"{_TAG}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_bounded(self, node: yaml.ScalarNode) -> bool | int | float | str:
        """The value that `node` holds, or its text where that is a number in base 60 only."""
        text, kind, where = node.value, node.tag.removeprefix(_TAG), node.start_mark.line + 1
        if ":" in text:
            return str(text)
        if len(text) > NUMBER_CHARACTERS_MAX:
            raise InvalidJobError(
                f"line {where}: a number of {len(text)} characters; use at most "
                f"{NUMBER_CHARACTERS_MAX}, or write text in quotes"
            )
        try:
            value: bool | int | float = yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except (ValueError, LookupError) as error:
            raise InvalidJobError(f"line {where}: {text!r} cannot be read as {kind}") from error
        if isinstance(value, int) and value not in INTEGERS:
            raise InvalidJobError(
                f"line {where}: {text} is a number of {value.bit_length()} bits; use at most 64"
            )
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before merges (`<<`) are expanded: merged keys may repeat.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise InvalidJobError(
                    f"line {key.start_mark.line + 1}: {key.value[:80]!r} is given twice; remove "
                    f"one of the two"
                )
            seen.add(key.value)
        return node


for _kind in ("bool", "int", "float"):
    _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.construct_bounded)


def _count(text: str) -> None:
    """Refuse a text that would be too deep or too large once every alias is expanded."""
    values, depth = 0, 0
    sizes: dict[str, int] = {}
    """Number of values that each finished anchor stands for."""
    open_anchors: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            values += sizes.get(event.anchor or "", VALUES_MAX + 1)
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            values, depth = values + 1, depth + 1
            open_anchors.append((event.anchor, values))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, before = open_anchors.pop()
            if anchor:
                sizes[anchor] = values - before + 1
        if depth > DEPTH_MAX or values > VALUES_MAX:
            raise InvalidJobError(
                f"the file has more than {DEPTH_MAX} levels, or more than {VALUES_MAX} values "
                f"with its aliases expanded; a job needs far fewer"
            )
