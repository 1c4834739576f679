"""Laws of sharing: what is pushed comes back as the same voice, nothing else goes up, and every refusal says why."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import filter_repo_objects
from toys import toy_voice

from vadusa_jax.hub import HubError, push
from vadusa_jax.voice import Voice

NAME = "someone/voice"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return toy_voice(tmp_path_factory.mktemp("voice") / "toy")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A Hub whose repositories are folders in the one that is returned; those with a `.private` in them are private."""
    root = tmp_path / "hub"

    class Api:
        def create_repo(self, repo_id, private, exist_ok):
            assert exist_ok
            if not (root / repo_id).exists():
                (root / repo_id).mkdir(parents=True)
                if private:
                    (root / repo_id / ".private").touch()
            return f"https://hub/{repo_id}"

        def repo_info(self, repo_id):
            return SimpleNamespace(private=(root / repo_id / ".private").exists())

        def upload_folder(self, repo_id, folder_path, allow_patterns, delete_patterns):
            for name in filter_repo_objects(names(root / repo_id), allow_patterns=delete_patterns):
                (root / repo_id / name).unlink()
            copy(folder_path, root / repo_id, allow_patterns)

    def snapshot_download(repo_id, revision, allow_patterns):
        if not (root / repo_id).exists():
            raise FileNotFoundError(f"404: no {repo_id}")
        return str(copy(root / repo_id, tmp_path / "cache" / (revision or "main"), allow_patterns))

    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return root


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def copy(source: Path, target: Path, patterns: list[str]) -> Path:
    for name in filter_repo_objects(names(source), allow_patterns=patterns):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return target


def test_what_is_pushed_comes_back_as_the_same_voice_and_nothing_else(folder, hub, tmp_path):
    given = shutil.copytree(folder, tmp_path / "given")
    for name in ("weights.pt", "notes.txt", "codec/cache.pkl"):
        (given / name).touch()
    assert push(given, NAME) == f"https://hub/{NAME}"
    (hub / NAME / "model.bin").touch()  # whatever others put there
    fetched, voice = Voice.from_pretrained(NAME, "v1"), Voice.load(folder)
    assert (fetched.config, fetched.trees, fetched.vocabulary) == (voice.config, voice.trees, voice.vocabulary)
    assert names(tmp_path / "cache" / "v1") == names(folder)
    assert all(
        (tmp_path / "cache" / "v1" / name).read_bytes() == (folder / name).read_bytes() for name in names(folder)
    )


def test_a_voice_that_is_pushed_again_takes_the_place_of_the_old_one(folder, hub, tmp_path):
    richer = shutil.copytree(folder, tmp_path / "richer")
    (richer / "draft").mkdir()
    shutil.copyfile(folder / "model.safetensors", richer / "draft" / "model.safetensors")
    push(richer, NAME, private=True)
    (hub / NAME / "README.md").write_text("Written there.")
    push(folder, NAME, private=True)
    assert names(hub / NAME) == sorted([".private", "README.md", *names(folder)])


def test_what_was_to_be_private_is_not_put_in_public(folder, hub):
    (hub / NAME).mkdir(parents=True)
    with pytest.raises(HubError, match=f"not pushed: '{NAME}' exists already and is public"):
        push(folder, NAME, private=True)
    assert not names(hub / NAME)


def test_a_folder_comes_before_the_hub(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    assert Voice.from_pretrained(folder).config == Voice.from_pretrained(str(folder)).config
    with pytest.raises(HubError, match="is a folder here, which has no revision 'v1'"):
        Voice.from_pretrained(folder, "v1")


def test_a_name_that_is_neither_is_an_error_that_names_both(hub):
    with pytest.raises(HubError, match=r"'out/voice' is neither a folder here nor OWNER/NAME.*404"):
        Voice.from_pretrained("out/voice")


@pytest.mark.parametrize("name", ["out/train/voice", "/nowhere", "../voice"])
def test_a_name_that_no_repository_can_have_never_reaches_the_hub(name):
    with pytest.raises(HubError, match=r"neither a folder here nor OWNER/NAME") as error:
        Voice.from_pretrained(name)
    assert isinstance(error.value.__cause__, HFValidationError)


def test_what_the_hub_refuses_is_told_with_the_folder(folder, hub, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("403: read-only token")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refuse)
    with pytest.raises(HubError, match=f"{folder} was not pushed to '{NAME}': 403: read-only token"):
        push(folder, NAME)


def test_without_the_library_the_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert Voice.from_pretrained(folder)
    for use in (lambda: Voice.from_pretrained(NAME), lambda: push(folder, NAME)):
        with pytest.raises(HubError, match=r"vadusa_jax\[hub\]"):
            use()


def test_export_pushes_a_voice_and_without_a_token_names_the_way_out(folder, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    ran = subprocess.run(
        [sys.executable, "-m", "vadusa_jax.export", "--voice", str(folder), "--push_to_hub", NAME],
        env=environment | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0 and f"{folder} was not pushed, there is no token: run `hf auth login`" in ran.stderr
