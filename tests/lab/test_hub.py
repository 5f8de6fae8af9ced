"""Data sets from the hub: one commit per run, whatever its branch does meanwhile; and what is said where none comes.

The hub here is a small server on this machine, with the routes that `hf_hub_download` uses.
"""

from __future__ import annotations

import hashlib
import http.server
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from run_helpers import campaign as small_campaign
from typer.testing import CliRunner

from breakeven.cli.lab import _schedule
from breakeven.cli.main import app
from breakeven.lab.campaign import Campaign, PromptFile
from breakeven.lab.campaign_file import CampaignError, load_campaign, parse_campaign
from breakeven.lab.data_files import Pin, pins, read_data_files
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import RecordError, RunDirectory
from breakeven.lab.runner import check_resumable, prepare
from breakeven.lab.workload.prompt import PromptError

pytest.importorskip("huggingface_hub", reason="reading from the hub needs its library: pip install 'breakeven[hub]'")

OLD, NEW = "a" * 40, "b" * 40
REPO, PARQUET, LINES = "someone/sums", "main/test-00000-of-00001.parquet", "data/questions.jsonl"


def questions(count: int, word: str) -> list[dict[str, str]]:
    return [{"question": f"How many {word} are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(count)]


def parquet(records: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=5)
    return bytes(sink.getvalue().to_pybytes())


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@dataclass
class Hub:
    """Data sets by name and commit. `refused`: status and error code of those that may not be read."""

    url: str = ""
    main: str = OLD
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    refused: tuple[int, str] | None = None
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        repo, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if self.refused is not None:
            return self.refused[0], {"X-Error-Code": self.refused[1]}, b""
        if repo != REPO:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        commit = {"main": self.main, "v1": OLD}.get(revision, revision)
        if commit not in (OLD, NEW):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if (commit, name) not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        body = self.files[commit, name]
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub whose branch `main` stands at OLD; NEW has the same files with other questions."""
    given = Hub()
    for commit, word in ((OLD, "figs"), (NEW, "pears")):
        given.files[commit, PARQUET] = parquet(questions(12, word))
        given.files[commit, LINES] = lines(questions(6, word))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            status, headers, body = given.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    given.url = f"http://127.0.0.1:{server.server_port}"
    yield given
    server.shutdown()
    server.server_close()
    thread.join()


Use = Callable[..., None]


@pytest.fixture
def use(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes the library use that hub, and a cache of the test's own: it reads the environment when it is imported."""

    def again(**variables: str) -> None:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        for name, value in {**own, **variables}.items():
            monkeypatch.setenv(name, value)
        for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
            monkeypatch.delitem(sys.modules, name)

    again()
    return again


def asked(path: str = LINES, **fields: Any) -> PromptFile:
    return PromptFile(hub=REPO, path=path, **fields)


def with_files(*files: dict[str, Any], **fields: Any) -> Campaign:
    return small_campaign(workload={"files": list(files), "max_tokens": 32}, **fields)


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None)
    return result


@pytest.mark.parametrize("path", [LINES, PARQUET])
def test_a_file_at_the_hub_is_read_as_the_same_file_here(hub: Hub, use: Use, tmp_path: Path, path: str) -> None:
    (found,) = read_data_files([asked(path, limit=5)])
    here = tmp_path / "a" / path.rpartition("/")[2]
    here.parent.mkdir()
    here.write_bytes(hub.files[OLD, path])
    (local,) = read_data_files([PromptFile(path=str(here), limit=5)])
    assert [p.messages for p in found.prompts] == [p.messages for p in local.prompts]
    assert len(found.prompts) == 5
    assert found.sha256 == local.sha256 == hashlib.sha256(hub.files[OLD, path]).hexdigest()
    assert {p.domain for p in found.prompts} == {"sums"}  # the data set's name says more than the file's
    assert found.record() == {
        "hub": REPO, "path": path, "revision": "main", "commit": OLD, "sha256": found.sha256,
        "size": len(hub.files[OLD, path]), "prompts": 5, "placeholders": 0,
    }  # fmt: skip
    assert (local.commit, local.record()["path"]) == (None, str(here))


def test_files_that_are_called_alike_in_one_domain_do_not_clash(hub: Hub, use: Use, tmp_path: Path) -> None:
    hub.files[OLD, "other/test-00000-of-00002.parquet"] = parquet(questions(3, "plums"))
    files = [asked(PARQUET), asked("other/test-00000-of-00002.parquet")]
    suites = load_suites(with_files(*(file.model_dump() for file in files)))
    assert len(suites["sums"].prompts) == 15


@pytest.mark.parametrize(("revision", "word"), [("main", "pears"), ("v1", "figs"), (OLD, "figs"), (None, "pears")])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, use: Use, revision: str | None, word: str) -> None:
    hub.main = NEW
    said: list[str] = []
    (found,) = read_data_files([asked(revision=revision)], say=said.append)
    assert word in found.prompts[0].messages[0]["content"]
    assert found.commit == (NEW if word == "pears" else OLD)
    assert REPO in said[0]
    assert str(found.commit) in said[1]


def test_a_pinned_commit_is_taken_whatever_the_branch_says_and_without_a_network(hub: Hub, use: Use) -> None:
    (first,) = read_data_files([asked()])
    hub.main = NEW
    known = pins({"files": [first.record(), {"path": "local.jsonl"}]})
    assert known == {(REPO, LINES, "main"): Pin(OLD, first.sha256)}
    hub.asked.clear()
    assert read_data_files([asked()], known) == (first,)
    assert hub.asked == []  # from the cache
    assert read_data_files([asked()])[0].commit == NEW
    use(HF_HUB_OFFLINE="1")
    assert read_data_files([asked()], known) == (first,)


def test_a_cached_file_that_was_changed_is_refused_where_the_run_had_another(hub: Hub, use: Use) -> None:
    (first,) = read_data_files([asked()])
    with pytest.raises(PromptError, match="not the one that the run was begun with: its SHA-256 is") as raised:
        read_data_files([asked()], {(REPO, LINES, "main"): Pin(OLD, "0" * 64)})
    assert first.sha256 in str(raised.value)


def test_deleting_the_file_that_is_named_has_it_fetched_again(hub: Hub, use: Use, tmp_path: Path) -> None:
    (first,) = read_data_files([asked()])
    known = pins({"files": [first.record()]})
    (held,) = (path for path in (tmp_path / "hf").resolve().rglob("blobs/*") if path.is_file())
    held.write_bytes(lines(questions(6, "plums")))
    with pytest.raises(PromptError, match=r"Delete .*, so that it is fetched again") as raised:
        read_data_files([asked()], known)
    assert f"Delete {held}, so" in str(raised.value)
    held.unlink()
    assert read_data_files([asked()], known) == (first,)


def test_files_that_are_read_together_are_of_one_commit_though_the_branch_moves(hub: Hub, use: Use) -> None:
    def push(words: str) -> None:
        if "commit" in words:  # the first file has come
            hub.main = NEW

    files = [asked(), asked(PARQUET), asked(limit=3), asked(revision="v1")]
    found = read_data_files(files, say=push)
    assert [file.commit for file in found] == [OLD] * 4
    assert all("figs" in prompt.messages[0]["content"] for file in found for prompt in file.prompts)
    assert read_data_files(files, pins({"files": [file.record() for file in found]})) == found
    assert read_data_files([asked()])[0].commit == NEW


def test_a_domain_that_no_file_has_is_told_with_the_data_set(hub: Hub, use: Use) -> None:
    given = small_campaign(workload={"files": [asked().model_dump()], "domains": ["none"], "max_tokens": 32})
    with pytest.raises(PromptError, match=f"^{REPO}, {LINES} holds no prompt of the domain 'none'"):
        load_suites(given)


def test_offline_without_the_file_says_which_data_set_and_what_to_do(hub: Hub, use: Use) -> None:
    use(HF_HUB_OFFLINE="1")
    with pytest.raises(PromptError) as raised:
        read_data_files([asked()])
    words = str(raised.value)
    assert f"{REPO} at the hub, {LINES} (main)" in words
    assert "HF_HUB_OFFLINE is set: unset it, or download the file elsewhere and give it as `path`" in words
    assert hub.asked == []


def test_no_network_says_which_hub_was_not_reached(hub: Hub, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library's pauses between its tries
    use(HF_ENDPOINT="http://127.0.0.1:9")
    with pytest.raises(PromptError, match=r"http://127\.0\.0\.1:9 cannot be reached.*try again with a network, or"):
        read_data_files([asked()])


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (asked("data/none.jsonl"), "there is no such file: those there are are listed at"),
        (asked(revision="v9"), "there is no such revision"),
        (PromptFile(hub="someone/none", path=LINES), "there is no such data set, or it is private.*HF_TOKEN"),
    ],
)
def test_what_is_not_at_the_hub_is_named(hub: Hub, use: Use, file: PromptFile, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        read_data_files([file])


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "GatedRepo", "gated: accept its terms at .*/datasets/someone/sums, and set HF_TOKEN"),
        (403, "GatedRepo", "gated: accept its terms"),
        (403, "", r"the hub refuses it \(HTTP 403\): set HF_TOKEN"),
    ],
)
def test_a_gated_data_set_asks_for_a_token(hub: Hub, use: Use, status: int, code: str, words: str) -> None:
    hub.refused = (status, code)
    with pytest.raises(PromptError, match=words):
        read_data_files([asked()])


def test_a_hub_that_is_down_says_how_it_answers(hub: Hub, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.refused = (503, "")
    with pytest.raises(PromptError, match=r"not in the cache, and http://.* answers with HTTP 503: try again"):
        read_data_files([asked()])


def test_a_hub_that_fails_in_some_other_way_is_an_error_and_no_crash(
    hub: Hub, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = importlib.import_module("huggingface_hub")

    def broken(*arguments: Any, **options: Any) -> str:
        raise RuntimeError("the line was cut\nand more")

    monkeypatch.setattr(library, "hf_hub_download", broken)
    with pytest.raises(PromptError, match=r"cannot be fetched \(RuntimeError: the line was cut\): try again, or"):
        read_data_files([asked()])


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "c.yaml").write_text(with_files(asked().model_dump()).model_dump_json())
    result = invoke("plan", str(tmp_path / "c.yaml"))
    assert result.exit_code == 2
    assert "pip install 'breakeven[hub]'" in result.output


def test_local_files_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "q.parquet").write_bytes(parquet(questions(3, "figs")))
    (found,) = read_data_files([PromptFile(path=str(tmp_path / "q.parquet"))])
    assert (len(found.prompts), found.commit, found.prompts[0].domain) == (3, None, "q")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{hub: https://huggingface.co/datasets/a/b, path: x.jsonl}", "is not a data set's name at the hub: write OWN"),
        ("{hub: datasets/a, path: x.jsonl}", "is not a data set's name at the hub"),
        ("{path: x.jsonl, revision: main}", "revision is that of a data set at the hub"),
        ("{hub: a/b, path: ../x.jsonl}", "must be the path of a file in the data set"),
        ("{hub: a/b, path: /x.jsonl}", "must be the path of a file in the data set"),
        ("{hub: a/b}", "path"),
    ],
)
def test_a_campaign_that_names_the_hub_wrongly_is_refused_with_its_line(entry: str, words: str) -> None:
    arms = "arms:\n  a: {type: attach, url: http://h}\n  b: {type: attach, url: http://h}\nbaseline: a\n"
    with pytest.raises(CampaignError, match=words) as raised:
        parse_campaign(f"{arms}workload:\n  files:\n    - {entry}\n")
    assert "line 7" in str(raised.value)


def test_a_path_at_the_hub_is_not_taken_from_the_campaigns_folder(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(with_files(asked().model_dump(), {"path": "own.jsonl"}).model_dump_json())
    first, second = load_campaign(file).campaign.workload.files
    assert (first.path, second.path) == (LINES, str(tmp_path / "own.jsonl"))


def test_placeholders_are_left_out_and_said(tmp_path: Path) -> None:
    hollow = {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}
    rows = [{"question_id": f"q{n}", "category": "maths", "turns": [f"What is {n}?"]} for n in range(6)]
    path = tmp_path / "speed.jsonl"
    path.write_bytes(lines([rows[0], {**rows[1], **hollow}, *rows[2:]]))
    files = read_data_files([PromptFile(path=str(path))])
    assert (len(files[0].prompts), files[0].record()["placeholders"]) == (5, 1)
    given = with_files({"path": str(path)})
    schedule = build_schedule(given, load_suites(given, files), files)
    assert any("1 records hold a placeholder" in note for note in schedule.notes)
    path.write_bytes(lines([{**row, **hollow} for row in rows]))
    with pytest.raises(PromptError, match="all of its 6 records hold a placeholder"):
        read_data_files([PromptFile(path=str(path))])


def test_a_run_keeps_the_commit_and_whoever_resumes_it_gets_the_same_prompts(
    hub: Hub, use: Use, tmp_path: Path
) -> None:
    given = with_files(asked(PARQUET).model_dump(), blocks=1, levels=[1])
    files = read_data_files(given.workload.files)
    schedule = build_schedule(given, load_suites(given, files), files)
    environment = json.loads(json.dumps(prepare(given, schedule)))
    run = RunDirectory.create(tmp_path / "run", given, "", environment)
    (record,) = environment["files"]
    assert (record["hub"], record["revision"], record["commit"]) == (REPO, "main", OLD)
    assert record["sha256"] == hashlib.sha256(hub.files[OLD, PARQUET]).hexdigest()
    hub.main = NEW
    check_resumable(run, given, _schedule(given, run.path))
    with pytest.raises(RecordError, match="begun with other prompts"):
        check_resumable(run, given, _schedule(given))


def test_a_tuning_that_is_continued_keeps_the_commit_of_its_first_round(hub: Hub, use: Use, tmp_path: Path) -> None:
    ngram = {"type": "embedded", "speculation": {"algorithm": "ngram", "num_steps": 3}}
    arms = {"off": {"type": "embedded"}, "ngram": ngram}
    given = with_files(asked(PARQUET).model_dump(), arms=arms, blocks=1, levels=[1])
    (tmp_path / "c.yaml").write_text(given.model_dump_json())
    command = ["tune", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out"), "--dry-run"]
    fresh = invoke(*command)
    assert (fresh.exit_code, OLD in fresh.stderr) == (0, True), fresh.output
    files = read_data_files(given.workload.files)
    schedule = build_schedule(given, load_suites(given, files), files)
    RunDirectory.create(tmp_path / "out" / "round-1", given, "", prepare(given, schedule))
    hub.main = NEW
    again = invoke(*command)
    assert (again.exit_code, OLD in again.stderr, NEW in again.stderr) == (0, True, False), again.output


@pytest.mark.slow
def test_a_resumed_run_asks_of_the_commit_that_it_was_begun_with(hub: Hub, use: Use, tmp_path: Path) -> None:
    file, out = tmp_path / "c.yaml", tmp_path / "run"
    given = with_files(asked(PARQUET).model_dump(), blocks=1, levels=[1])
    file.write_text(given.model_dump_json())
    begun = invoke("run", str(file), "--out", str(out))
    assert begun.exit_code == 0, begun.output
    run = RunDirectory.open(out)
    (record,) = run.environment["files"]
    assert (record["hub"], record["revision"], record["commit"]) == (REPO, "main", OLD)
    assert record["sha256"] == hashlib.sha256(hub.files[OLD, PARQUET]).hexdigest()
    assert OLD in (out / "report.html").read_text(encoding="utf-8")

    hub.main = NEW
    hub.asked.clear()
    for arguments in (["--resume", "--out", str(out)], [str(file), "--resume", "--out", str(out)]):
        resumed = invoke("run", *arguments)
        assert resumed.exit_code == 0, resumed.output
        assert OLD in resumed.output  # said on stderr
    assert hub.asked == []
    file.write_text(file.read_text().replace('"revision":null', '"revision":"v1"'))
    assert (
        "another campaign (changed since: workload)" in invoke("run", str(file), "--resume", "--out", str(out)).output
    )
    assert NEW in invoke("plan", str(write_new(tmp_path))).output


def write_new(folder: Path) -> Path:
    path = folder / "new.yaml"
    path.write_text(with_files(asked(PARQUET).model_dump()).model_dump_json())
    return path


def test_the_command_line_says_on_stderr_what_it_fetches(hub: Hub, use: Use, tmp_path: Path) -> None:
    result = invoke("plan", str(write_new(tmp_path)))
    assert result.exit_code == 0, result.output
    assert f"data set {REPO} at the hub, {PARQUET} (main)" in result.stderr
    assert OLD in result.stderr
    assert "data set" not in result.stdout
    assert (tmp_path / "hf" / "hub" / "datasets--someone--sums" / "snapshots" / OLD / PARQUET).exists()
