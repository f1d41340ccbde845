"""Models on the Hugging Face hub, `hf://ORG/NAME[@REVISION]`: the files of one commit that `import` reads, in the hub
library's cache.

huggingface_hub makes the requests and reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.  It is loaded only for
such a reference; nothing else uses the network.  In its cache a file is a link to a blob named by the hub's hash:
SHA-256 for LFS files, git's own hash for others."""

import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_lm.addresses import HUB_SCHEME
from spmd_lm.config.load import VOCABULARY_FILES
from spmd_lm.data.tokenizers.vocabulary import COMPANION_FILES, CONFIG_JSON
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.directory import CHAT_TEMPLATES
from spmd_lm.huggingface.safetensors_io import INDEX_FILE, find_single_file, read_json

# Patterns of files downloaded before the weights.
SMALL_FILES = [CONFIG_JSON, INDEX_FILE, *VOCABULARY_FILES, *COMPANION_FILES, f"{CHAT_TEMPLATES}/*.jinja"]
TIMEOUT = 10  # seconds for the first answer, for which the library would wait forever
HUB_NAME = r"\w[\w.-]{0,95}"
REFERENCE = re.compile(rf"(?a){HUB_SCHEME}({HUB_NAME}/{HUB_NAME})(?:@({HUB_NAME}(?:/{HUB_NAME}){{0,4}}))?")


@dataclass(frozen=True)
class HubModel:
    """A downloaded model."""

    directory: Path  # in the cache
    record: dict[str, Any]  # its origin, kept by the run
    others: list[str]  # files of the commit that were not downloaded


def download(reference: str) -> HubModel:
    """Downloads missing files.  Raises ConfigError if that fails, or if a file's hash is not the hub's."""
    match = REFERENCE.fullmatch(reference)
    if not match:
        raise ConfigError(f"{reference[:120]!r}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION. Correct it.")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        what = f"{reference}: huggingface_hub is not installed"
        raise ConfigError(f"{what}. Run pip install 'spmd-lm[hub]', or download the model and name its DIR.") from None
    try:
        snapshot, wanted, names = _fetch(reference, *match.groups())
    except ConfigError:
        raise
    except Exception as error:  # the library's, its HTTP client's and the system's errors have no other class in common
        raise ConfigError(f"{reference}: {_explain(error)}") from error
    hashes = {name: _checked_sha256(snapshot / name, reference) for name in wanted}
    record = {"reference": reference, "commit": snapshot.name, "sha256": hashes}
    return HubModel(snapshot, record, sorted(name for name in names if name not in hashes and not name.startswith(".")))


def _fetch(reference: str, repo: str, revision: str | None) -> tuple[Path, list[str], list[str]]:
    """The directory of the revision's commit in the cache, the wanted files, and all files.  If the hub is unreachable,
    the cache must have them."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api, unreachable = HfApi(), None
    try:
        api.model_info(repo, revision=revision, timeout=TIMEOUT)
    except Exception as error:
        if not _is_unreachable(error):
            raise
        unreachable = error
    cached = unreachable is not None
    try:
        snapshot = Path(
            api.snapshot_download(repo, revision=revision, allow_patterns=SMALL_FILES, local_files_only=cached)
        )
        names = [file.path for file in get_cached_repo_tree(repo, revision=snapshot.name)]
        weights = [*_weight_files(reference, snapshot, names)]
        for name in weights:
            api.hf_hub_download(repo, name, revision=snapshot.name, local_files_only=cached)
    except Exception as error:
        if unreachable and not isinstance(error, ConfigError):
            raise unreachable from None
        raise
    wanted = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL_FILES)]
    return snapshot, [*wanted, *weights], names


def _weight_files(reference: str, snapshot: Path, names: Iterable[str]) -> Iterator[str]:
    """Names of the files with tensors, as SafetensorsReader finds them."""
    if INDEX_FILE not in names:
        yield find_single_file(reference, names)
        return
    weight_map = read_json(snapshot / INDEX_FILE).get("weight_map")
    listed = weight_map.values() if isinstance(weight_map, dict) else ()
    yield from (name for name in names if name in listed and "/" not in name and name.endswith(".safetensors"))


def _checked_sha256(path: Path, reference: str) -> str:
    """SHA-256 of a file in the cache, in hex.  Raises ConfigError if it contradicts the hash in its blob's name."""
    with open(path, "rb") as file:
        found = sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    expected = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
    if len(expected) == 40:  # git's hash, for files of at most 10 MB
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if not expected:
        what = "the cache has a copy, which does not tell the hash that the hub gave"
        raise ConfigError(f"{reference}: {path.name}: {what}. Unset HF_HUB_DISABLE_SYMLINKS and name another HF_HOME.")
    if found != expected:
        what = f"its hash is {found}, but the hub has {expected}: it is damaged, or another file"
        raise ConfigError(f"{reference}: {path.name}: {what}. Delete {path.resolve()} and import again.")
    return sha256


def _is_unreachable(error: BaseException) -> bool:
    """True if the hub did not answer, or answered with a server error."""
    from httpx2 import TransportError
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(error, TransportError | OfflineModeIsEnabled) or status >= 500


def _explain(error: BaseException) -> str:
    """The cause and the remedy, in sentences."""
    from huggingface_hub import errors

    causes = [error]
    while cause := causes[-1].__cause__:
        causes.append(cause)
    sentences: dict[type, str] = {
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE is set, and the cache does not have it. Unset it to download.",
        errors.GatedRepoError: "access is restricted. Accept its terms on its page, and set HF_TOKEN.",
        errors.RepositoryNotFoundError: "no such model, or a private one. Correct the name, or set HF_TOKEN.",
        errors.RevisionNotFoundError: "no such revision. Name a branch, a tag or a commit of it.",
    }
    for kind, sentence in sentences.items():
        if any(isinstance(each, kind) for each in causes):
            return sentence
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    statuses = {getattr(getattr(each, "response", None), "status_code", 0) for each in causes}
    if statuses & {401, 403}:
        return f"access is refused: {reason:.200}. Correct the name, or set HF_TOKEN."
    if any(map(_is_unreachable, causes)):
        return f"the hub cannot be reached: {reason:.200}. Check the network and HF_ENDPOINT, and import again."
    return f"cannot be downloaded: {reason:.200}. Mend that, and import again."
