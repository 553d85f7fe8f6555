"""The hub: whether it answers, what its cache holds, and a model's files from it.

A hub that hangs must not hang us: before any download one metadata request is made on a thread that may be
abandoned, since no timeout of an HTTP client covers the name's resolution. That same request tells gated from
missing from unreachable. When the answer is no, the cache may still hold the model whole.
"""

import threading
from pathlib import Path

from compress.errors import CompressError
from compress.models.files import check_weights

PROBE_SECONDS = 3.0
_WANTED = [
    "*.safetensors",
    "*.json",
    "*.model",
    "*.jinja",
    "*.txt",
    "*.md",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
]
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]  # subfolders; the same weights in their maker's layout


def failures() -> tuple[type[Exception], ...]:
    """What a request to the hub may raise, whichever HTTP client huggingface_hub uses."""
    from huggingface_hub import errors

    return errors.HTTPError, OSError, ValueError  # type: ignore[attr-defined]  # imported there, not exported


def cached_file(repo: str, file: str, revision: str | None, *, repo_type: str | None = None) -> Path | None:
    """A file of a snapshot in huggingface_hub's cache; None when it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision, repo_type=repo_type)
    return Path(found) if isinstance(found, str) else None


def probe(repo: str, file: str, revision: str | None, *, repo_type: str | None = None) -> Exception | None:
    """Ask for one file's metadata, `PROBE_SECONDS` at most in all: None when it can be had, else why not."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    outcome: list[Exception | None] = []
    expected = failures()

    def ask() -> None:
        try:
            url = hf_hub_url(repo, file, revision=revision, repo_type=repo_type)
            found = get_hf_file_metadata(url, timeout=PROBE_SECONDS)
            outcome.append(None if found.commit_hash else OSError("what answers there is not a hub"))
        except expected as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return outcome[0] if outcome else TimeoutError(f"no answer within {PROBE_SECONDS:.0f} seconds")


def download_config(repo: str, revision: str | None, install: str | None) -> Path:
    """Download `config.json`, nothing else, and return the snapshot's folder.

    Args:
        repo, revision: the hub id and a branch, tag or commit.
        install: the command that brings the same weights without the hub, for the refusal.

    Raises:
        CompressError: the hub says no, or nothing.
    """
    from huggingface_hub import hf_hub_download

    if error := probe(repo, "config.json", revision):
        raise _refusal(repo, revision, error, install) from error
    try:
        path = hf_hub_download(repo, "config.json", revision=revision, etag_timeout=PROBE_SECONDS)
    except failures() as error:
        raise _refusal(repo, revision, error, install) from error
    return Path(path).parent


def download(repo: str, revision: str | None, install: str | None) -> Path:
    """Download weights, configs and tokenizer, or find them in the cache when the hub can't be had.

    Raises:
        CompressError: the hub says no, or nothing; the weights are not safetensors, or not whole.
    """
    from huggingface_hub import constants, snapshot_download

    error = probe(repo, "config.json", revision)
    refusal = _refusal(repo, revision, error, install) if error else None
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=refusal is not None,
            )
        )
    except failures() as lost:
        raise (refusal or _refusal(repo, revision, lost, install)) from lost
    if refusal is None and not any(folder.glob("*.safetensors")):
        raise CompressError(
            f"the repository {repo} offers no safetensors weights",
            where=f"{constants.ENDPOINT}/{repo}",
            hint="convert it at https://huggingface.co/spaces/safetensors/convert, or name a folder",
        )
    try:
        check_weights(folder)
    except CompressError as damaged:
        raise (refusal or damaged) from damaged
    return folder


def _refusal(repo: str, revision: str | None, error: Exception, install: str | None) -> CompressError:
    """What the hub's answer means for the user, and the ways around it."""
    from huggingface_hub import constants, errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    folder = repo.rpartition("/")[2]
    around = (
        f"or {f'run `{install}`; or ' if install else ''}download it elsewhere "
        f"(`hf download {repo} --local-dir {folder}`) and name the folder ./{folder}"
    )
    accept = f"https://huggingface.co/{repo} and run `hf auth login`"
    missing = isinstance(error, errors.RepositoryNotFoundError) or status == 404
    if isinstance(error, errors.HFValidationError):
        what, hint = f"{repo!r} is no hub id: {error}", "check the spelling"
    elif isinstance(error, errors.RevisionNotFoundError):
        what, hint = f"{repo} has no revision {revision!r}", "check the branch, tag or commit"
    elif isinstance(error, errors.RemoteEntryNotFoundError):
        what, hint = f"{repo} has no config.json", "name a repository in transformers' layout"
    elif isinstance(error, errors.GatedRepoError) or (status in (401, 403) and not missing):
        what = f"{repo} is gated: its license must be accepted by the account that downloads it"
        hint = f"accept it at {accept}; {around}"
    elif missing:
        what = f"the hub has no repository {repo}, or this account may not see it (HTTP {status})"
        hint = (
            f"check the spelling (a local folder is written ./{repo}); a private or gated one needs its "
            f"license accepted at {accept}"
        )
    else:
        why = f"HTTP {status}" if status else f"{type(error).__name__}: {error}".splitlines()[0]
        what = f"{repo} is not in the cache, and the hub can't be reached ({why})"
        hint = f"check the network, or set HF_ENDPOINT to a mirror; {around}"
    return CompressError(what, where=f"{constants.ENDPOINT}/{repo}", hint=hint)
