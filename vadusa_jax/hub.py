"""Folders shared through the Hugging Face Hub (extra `[hub]`).

Only JSON, safetensors and Markdown go up or come down: no file that could run anything when it is read.
"""

from collections.abc import Sequence
from pathlib import Path

FILES = ("*.json", "*.safetensors", "*.md")  # in any folder below


class HubError(OSError):
    """What cannot be fetched or pushed."""


def fetch(name: str | Path, revision: str | None = None, files: Sequence[str] = FILES) -> Path:
    """The folder of that name, or else the repository: its files, in the cache that all programs share.

    Args:
        name: a folder, or OWNER/NAME on the Hub.
        revision: branch, tag or commit of the repository; its main branch by default.
        files: patterns of what is fetched.

    Raises:
        HubError: neither the one nor the other can be read; it says why.
    """
    if Path(name).is_dir():
        if revision:
            raise HubError(f"{name} is a folder here, which has no revision {revision!r}")
        return Path(name)
    hub = _library(f"{name!r} is no folder here")
    try:
        return Path(hub.snapshot_download(str(name), revision=revision, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise HubError(
            f"{str(name)!r} is neither a folder here nor OWNER/NAME of a model on the Hugging Face Hub that can be "
            f"fetched now: {error}"
        ) from error


def push(folder: Path, name: str, private: bool | None = None) -> str:
    """Makes the repository `name` hold FILES of the folder and no other JSON or safetensors; returns its address.

    Args:
        private: visibility of a repository that is made now; by default what its owner has set. One that exists
            keeps its own: True for a public one is an error.

    Raises:
        HubError: there is no token, or the Hub refuses; the folder stays as it is.
    """
    hub = _library(f"{folder} was not pushed")
    if hub.get_token() is None:
        raise HubError(
            f"{folder} was not pushed, there is no token: run `hf auth login`, or set HF_TOKEN to a token that may "
            "write (huggingface.co/settings/tokens)"
        )
    api = hub.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        public = private and not api.repo_info(name).private
        if not public:
            api.upload_folder(
                repo_id=name, folder_path=folder, allow_patterns=list(FILES), delete_patterns=list(FILES[:2])
            )
    except Exception as error:  # the Hub's, or those of the HTTP library that it happens to use
        raise HubError(f"{folder} was not pushed to {name!r}: {error}") from error
    if public:
        raise HubError(f"{folder} was not pushed: {name!r} exists already and is public")
    return str(address)


def _library(otherwise: str):
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(f"{otherwise}; the Hub needs huggingface_hub: pip install 'vadusa_jax[hub]'") from error
    return huggingface_hub
