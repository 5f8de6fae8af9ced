"""What the README and the documentation tell a reader to type is what the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from breakeven.cli.main import app
from breakeven.lab.campaign_file import load_campaign
from breakeven.lab.plan import build_schedule, load_suites

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("README.md"))


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of these kinds."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
            if inside:
                found.append((line[3:].strip(), []))
        elif inside:
            found[-1][1].append(line)
    return ["\n".join(lines) for kind, lines in found if kind in kinds]


def commands() -> list[str]:
    """Every `breakeven …` that stands at the beginning of a line of a block, continued lines joined."""
    lines = (
        line for page in PAGES for block in blocks(page, "sh", "") for line in block.replace("\\\n", " ").splitlines()
    )
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("breakeven ")]


def test_commands_are_found() -> None:
    assert len(commands()) >= 8


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_is_one_that_the_program_parses(line: str) -> None:
    _, *words = shlex.split(line)
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):  # a group, such as `breakeven train`
        command = command.commands[words.pop(0)]
    with command.make_context(command.name, words) as context:
        assert context.params


def test_the_campaign_of_the_readme_can_be_planned(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "campaign.yaml").write_text(text, encoding="utf-8")
    campaign = load_campaign(tmp_path / "campaign.yaml").campaign
    assert build_schedule(campaign, load_suites(campaign)).launches


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_that_pages_name_exist(page: Path) -> None:
    for script in re.findall(r"python (\S+\.py)", page.read_text(encoding="utf-8")):
        assert (ROOT / script).is_file(), script
