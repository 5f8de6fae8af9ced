"""Campaign files: YAML in, a `Campaign` out, or errors that name file, line and field.

The YAML is that of version 1.2: only `true` and `false` are booleans. In version 1.1, which PyYAML follows by default,
an arm named `off` would be the boolean False.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from breakeven.lab.campaign import ARM_TYPES, Arrivals, Campaign, Conditions, Sampling, Speculation
from breakeven.lab.engines import EngineArm, EngineSpeculation

MAX_BYTES = 1_000_000
_MAX_NODES = 50_000  # after aliases are followed: a small file can unfold into a huge one
_MAX_DEPTH = 50
_MAX_SHOWN = 20
_INT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")

_UNION_MEMBERS = (Speculation.__name__, EngineSpeculation.__name__)

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class CampaignProblem:
    """One thing that is wrong. `line` counts from 1; `field` is a dotted path, empty for the whole file."""

    line: int | None
    field: str
    message: str


class CampaignError(ValueError):
    """A campaign file that cannot be used; `str()` lists every problem with file, line and field."""

    def __init__(self, source: str, problems: Sequence[CampaignProblem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = []
        for problem in self.problems[:_MAX_SHOWN]:
            where = source if problem.line is None else f"{source}, line {problem.line}"
            lines.append(f"{where}: {problem.field + ': ' if problem.field else ''}{problem.message}")
        if len(self.problems) > _MAX_SHOWN:
            lines.append(f"{source}: and {len(self.problems) - _MAX_SHOWN} more problems")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class CampaignFile:
    """A campaign with the text that it came from."""

    campaign: Campaign
    text: str
    path: Path


def load_campaign(path: str | Path) -> CampaignFile:
    """Reads a campaign file. Relative paths in it (prompts, traces, a calibration) are taken from its own folder.

    Raises CampaignError for a file that cannot be read, is no YAML, or is no campaign.
    """
    path = Path(path)
    source = str(path)

    def fail(message: str) -> CampaignError:
        return CampaignError(source, [CampaignProblem(None, "", message)])

    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise fail(f"cannot be read: {problem.strerror or problem}") from None
    if len(data) > MAX_BYTES:
        raise fail(f"is larger than {MAX_BYTES} bytes, which no campaign is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise fail(f"is not UTF-8 (byte {problem.start}): save it as UTF-8") from None
    return CampaignFile(_resolve_paths(parse_campaign(text, source), path.parent), text, path)


def _resolve_paths(campaign: Campaign, folder: Path) -> Campaign:
    """Relative paths count from the campaign file's folder."""

    def resolved(name: str | None) -> str | None:
        return None if name is None else str((folder / Path(name).expanduser()).resolve())

    workload, arrivals, client = campaign.workload, campaign.arrivals, campaign.client
    files = tuple(
        file if file.hub is not None else file.model_copy(update={"path": resolved(file.path)})
        for file in workload.files
    )
    workload = workload.model_copy(update={"prompts_file": resolved(workload.prompts_file), "files": files})
    if arrivals.trace is not None:
        arrivals = arrivals.model_copy(update={"trace": resolved(arrivals.trace)})
    if client.calibration not in ("quick", "off"):
        client = client.model_copy(update={"calibration": resolved(client.calibration)})
    conditions = campaign.conditions
    if conditions is not None and conditions.arrivals is not None:
        named = {
            name: given.model_copy(update={"trace": resolved(given.trace)})
            for name, given in conditions.arrivals.items()
        }
        conditions = conditions.model_copy(update={"arrivals": named})
    return campaign.model_copy(
        update={"workload": workload, "arrivals": arrivals, "client": client, "conditions": conditions}
    )


def parse_campaign(text: str, source: str = "campaign") -> Campaign:
    """A campaign from YAML text. Raises CampaignError with every problem found."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        words = " ".join(part for part in (problem.context, problem.problem) if part)
        raise CampaignError(
            source, [CampaignProblem(mark.line + 1 if mark else None, "", f"not YAML: {words}")]
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        words = str(problem).replace("\n", " ") or "nested too deeply"
        raise CampaignError(source, [CampaignProblem(None, "", f"not YAML: {words}")]) from None
    if root is None:
        raise CampaignError(source, [CampaignProblem(None, "", "is empty: a campaign needs arms and a baseline")])
    reader = _Reader()
    value = reader.read(root, ())
    if reader.problems:
        raise CampaignError(source, reader.problems)
    if not isinstance(value, dict):
        raise CampaignError(
            source, [CampaignProblem(1, "", "must be a mapping with arms, baseline and so on (`name: value` lines)")]
        )
    try:
        # Through JSON, where a list is the only sequence and strictness still refuses "3" for 3.
        return Campaign.model_validate_json(json.dumps(value))
    except ValidationError as problem:
        raise CampaignError(source, _explain(problem, value, reader.lines)) from None


class _Reader:
    """YAML nodes → plain values, with the line of every field."""

    def __init__(self) -> None:
        self.lines: dict[FieldPath, int] = {}
        self.problems: list[CampaignProblem] = []
        self._nodes = 0

    def problem(self, node: Node, path: FieldPath, message: str) -> None:
        self.problems.append(CampaignProblem(node.start_mark.line + 1, _dotted(path), message))

    def read(self, node: Node, path: FieldPath) -> Any:
        self._nodes += 1
        self.lines.setdefault(path, node.start_mark.line + 1)
        if self._nodes > _MAX_NODES or len(path) > _MAX_DEPTH:
            if self._nodes <= _MAX_NODES or not self.problems:
                self.problem(node, path[:3], "nested too deeply, or too large once its aliases are followed")
            return None
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[tuple[Node, Node]] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problem(key_node, path, "a key must be a plain word, not a list or a mapping")
                continue
            key = str(key_node.value)
            if key == "<<" and key_node.style is None:
                merged.append((key_node, value_node))
                continue
            here = (*path, key)
            if key in found:
                first = self.lines[here]
                self.problem(key_node, here, f"the key occurs twice; it is already set on line {first}")
                continue
            self.lines[here] = key_node.start_mark.line + 1
            found[key] = self.read(value_node, here)
        for key_node, value_node in merged:
            for source in value_node.value if isinstance(value_node, SequenceNode) else [value_node]:
                if not isinstance(source, MappingNode):
                    self.problem(key_node, path, "<< takes a mapping (an alias such as *base)")
                    continue
                for key, value in self._mapping(source, path).items() if source is not node else ():
                    found.setdefault(key, value)
        return found

    def _scalar(self, node: ScalarNode, path: FieldPath) -> Any:
        text = str(node.value)
        tag = node.tag
        if tag.startswith(("!", "tag:yaml.org,2002:python")):
            self.problem(node, path, f"the tag {tag} is not known: write a plain value")
            return None
        if node.style is not None:  # quoted or a block
            return text
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if text in ("true", "True", "TRUE"):
            return True
        if text in ("false", "False", "FALSE"):
            return False
        if _INT.match(text):
            if len(text) > 25:
                self.problem(node, path, "this number is too large")
                return None
            return int(text)
        if _FLOAT.match(text):
            value = float(text)
            if math.isinf(value):
                self.problem(node, path, "this number is too large")
                return None
            return value
        if _SPECIAL.match(text):
            self.problem(node, path, f"{text} is not a number that can be used here")
            return None
        return text


def _dotted(path: FieldPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _explain(error: ValidationError, value: Mapping[str, Any], lines: Mapping[FieldPath, int]) -> list[CampaignProblem]:
    """pydantic's findings in our words, sorted by line."""
    problems: dict[tuple[str, str], CampaignProblem] = {}
    for finding in error.errors(include_url=False):
        path = _document_path(tuple(finding["loc"]), value)
        message = _words(finding, path, value)
        if message is None:
            continue
        line_path = path
        while line_path and line_path not in lines:
            line_path = line_path[:-1]
        problem = CampaignProblem(lines.get(line_path), _dotted(path), message)
        problems.setdefault((problem.field, message), problem)
    return sorted(problems.values(), key=lambda problem: (problem.line or 0, problem.field))


def _document_path(loc: FieldPath, value: Mapping[str, Any]) -> FieldPath:
    """pydantic puts the names of a union's members into its locations; the document knows nothing of them."""
    path: list[str | int] = []
    here: Any = value
    for position, part in enumerate(loc):
        if isinstance(here, dict):
            last = position == len(loc) - 1
            member = (len(path) == 2 and path[0] == "arms" and part in ARM_TYPES) or (
                isinstance(part, str) and (part in _UNION_MEMBERS or part.startswith(("literal[", "function-")))
            )
            if member and not (last and part in here):
                continue
            path.append(part)
            here = here.get(part) if isinstance(part, str) else None
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path.append(part)
            here = here[part]
        else:
            break  # what follows describes the value's type, not a place in the document
    return tuple(path)


def _words(finding: Any, path: FieldPath, value: Mapping[str, Any]) -> str | None:
    kind = finding["type"]
    context = finding.get("ctx", {})
    if kind == "extra_forbidden":
        known = _known_fields(path[:-1], value)
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        advice = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown field; {advice}"
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_not_found":
        return f"'type' is missing: choose one of {', '.join(ARM_TYPES)}"
    if kind == "union_tag_invalid":
        return f"unknown type {context.get('tag')!r}: choose one of {', '.join(ARM_TYPES)}"
    if kind == "value_error":
        return str(context.get("error", finding["msg"]))
    found = finding.get("input")
    if kind == "literal_error":
        if path[-1:] == ("speculation",) and isinstance(found, dict):
            return None  # the other member of the union says what is wrong with the mapping
        if path == ("sampling", "seed"):
            return f"must be a whole number, per_request or null, found {_shown(found)}"
        return f"must be {context.get('expected')}, found {_shown(found)}"
    if kind in ("model_type", "model_attributes_type") and path[-1:] == ("speculation",):
        return None
    if path == ("sampling", "seed") and kind.startswith("int"):
        return None  # as above
    message = str(finding["msg"]).removeprefix("Input ")
    if kind == "model_type" or kind.startswith("dict"):
        return f"must be a mapping, found {_shown(found)}"
    return f"{message.removesuffix('.')}, found {_shown(found)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "…"


def _known_fields(path: FieldPath, value: Mapping[str, Any]) -> list[str]:
    """The fields that a section may have."""
    model: type[BaseModel] | None = Campaign
    if path[:1] == ("arms",) and len(path) >= 2:
        arm = value.get("arms", {}).get(path[1], {})
        model = ARM_TYPES.get(arm.get("type"))
        if len(path) > 2:
            model = EngineSpeculation if model is not None and issubclass(model, EngineArm) else Speculation
    elif path[:2] in (("conditions", "sampling"), ("conditions", "arrivals")) and len(path) == 3:
        model = Sampling if path[1] == "sampling" else Arrivals
    elif path[:1] == ("conditions",):
        model = Conditions
    else:
        for part in path:
            if isinstance(part, str):  # a number is a place in a list, whose items are of one model
                field = model.model_fields.get(part) if model else None
                model = _section_in(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if any: `Tune` of `Tune | None`, `PromptFile` of `tuple[PromptFile, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part)) is not None), None)
