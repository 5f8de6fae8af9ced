"""One file of a data set at the Hugging Face hub, at one commit, through the hub's own library and its cache.

The library (`pip install 'breakeven[hub]'`) is imported only when a file is asked for. HF_ENDPOINT, HF_TOKEN, HF_HOME
and HF_HUB_OFFLINE mean what they mean to it. A file of a full commit that is in the cache needs no network.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from breakeven.lab.workload.prompt import PromptError

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_ELSEWHERE = "or download the file elsewhere and give it as `path`, without `hub`"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in the hub's cache. `commit`: what the revision stood for, 40 hexadecimal digits."""

    path: Path
    commit: str


def fetch(repo: str, path: str, revision: str, say: Callable[[str], None] = lambda words: None) -> HubFile:
    """The file `path` of the data set `repo`, downloaded unless it is in the cache; `say` is told what is fetched.

    `revision`: a branch, a tag or a commit. PromptError where there is no library, no
    network, no such data set, file or revision, or no right to it; the message says what to do.
    """
    what = f"{repo} at the hub, {path} ({revision})"
    try:
        hub, errors, constants = (
            importlib.import_module(f"huggingface_hub{part}") for part in ("", ".errors", ".constants")
        )
    except ImportError:
        raise PromptError(
            f"{what}: reading from the hub needs its library: pip install 'breakeven[hub]', {_ELSEWHERE}"
        ) from None
    say(f"data set {what}")
    try:
        found = Path(hub.hf_hub_download(repo, path, repo_type="dataset", revision=revision))
    except Exception as problem:  # errors of the hub, of whichever HTTP library it uses, and of the disk
        raise PromptError(f"{what}: {_why(problem, errors, constants, repo, path, revision)}") from None
    commit = _commit_of(found, path)
    say(f"data set {repo}: commit {commit}, in {found}")
    return HubFile(found, commit)


def _commit_of(found: Path, path: str) -> str:
    """The cache holds a file as …/snapshots/COMMIT/PATH."""
    commit = found.parents[len(PurePosixPath(path).parts) - 1].name
    if not _COMMIT.match(commit):
        raise PromptError(f"{found}: the cache of the hub's library is laid out in a way that is not known")
    return commit


def _why(problem: Exception, errors: Any, constants: Any, repo: str, path: str, revision: str) -> str:
    """What went wrong and what to do. The order matters: the hub's errors are each other's subclasses."""
    endpoint = constants.ENDPOINT
    token = "set HF_TOKEN to a token of an account that may read it"
    answers = (getattr(error, "response", None) for error in (problem, problem.__cause__))
    status = next((answer.status_code for answer in answers if answer is not None), None)
    if isinstance(problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) and status not in (401, 403):
        if constants.HF_HUB_OFFLINE:
            reason, remedy = "HF_HUB_OFFLINE is set", "unset it"
        else:
            reason = f"{endpoint} " + ("cannot be reached" if status is None else f"answers with HTTP {status}")
            remedy = "try again with a network"
        return f"it is not in the cache, and {reason}: {remedy}, {_ELSEWHERE}"
    if isinstance(problem, errors.GatedRepoError):
        return f"the data set is gated: accept its terms at {endpoint}/datasets/{repo}, and {token}"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return f"there is no such data set, or it is private: check the name (OWNER/NAME); if it is private, {token}"
    if isinstance(problem, errors.RevisionNotFoundError):
        return f"there is no such revision: give a branch, a tag or a commit of {endpoint}/datasets/{repo}"
    if isinstance(problem, errors.EntryNotFoundError) and status not in (401, 403):
        return f"there is no such file: those there are are listed at {endpoint}/datasets/{repo}/tree/{revision}"
    if status in (401, 403):
        return f"the hub refuses it (HTTP {status}): {token}"
    first = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
    return f"cannot be fetched ({type(problem).__name__}: {first[:300]}): try again, {_ELSEWHERE}"
