"""Wheels, sdists, folders and git refs read alike; bad ones end in one clear error and leave nothing behind."""

from __future__ import annotations

import io
import subprocess
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
from fake_upstream import FILES, edited

from mcore_compat.contract.extract.modules import CandidateSyntaxError
from mcore_compat.contract.extract.surface import extract
from mcore_compat.contract.rules.compare import FindingState, compare_contracts
from mcore_compat.contract.rules.rule import load_rules
from mcore_compat.contract.source.candidate import NoSuchCandidateError, open_candidate, parse_candidate
from mcore_compat.contract.source.git import GitError, commits_between, read_git
from mcore_compat.contract.source.tree import (
    BrokenSourceError,
    NotMegatronError,
    SourceError,
    SourceTooLargeError,
    UnsafeArchiveError,
    read_directory,
    read_sdist,
    read_wheel,
)

EXPECTED = extract(edited(), "fake")
RULES = load_rules(Path(__file__).parents[3] / "compat_matrix" / "rules")


def write_tree(folder: Path) -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_wheel(path: Path, files=FILES) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def run_git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write_tree(tmp_path / "checkout")
    run_git(tmp_path, "init", "-q", "-b", "main", "checkout")
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-q", "-m", "first")
    run_git(folder, "tag", "v1")
    return folder


def test_all_forms_give_the_same_contract(tmp_path, repository):
    wheel = write_wheel(tmp_path / "megatron_core-0.18.0-py3-none-any.whl")
    sdist = tmp_path / "megatron_core-0.18.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"megatron_core-0.18.0/{name if 'dist-info' not in name else 'PKG-INFO'}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    environment = tmp_path / "venv"
    write_tree(environment / "lib" / "python3.12" / "site-packages")
    bare = tmp_path / "bare.git"
    run_git(tmp_path, "clone", "-q", "--bare", str(repository), str(bare))
    for text in (wheel, sdist, environment, repository, bare, f"git+file://{repository}@v1", f"git+file://{bare}@main"):
        contract = extract(open_candidate(parse_candidate(str(text)), ()))
        assert contract.digest() == EXPECTED.digest(), text
        assert str(tmp_path) not in contract.to_json()


def test_an_uncommitted_change_counts_in_a_folder_and_not_in_its_head(repository):
    path = repository / "megatron/core/models/gpt/gpt_model.py"
    path.write_text(path.read_text().replace("self.output_layer(", "self.lm_head("))
    assert extract(read_directory(repository)).digest() != EXPECTED.digest()
    assert extract(read_git(repository, "HEAD")).digest() == EXPECTED.digest()


def zip_of(files) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return stream.getvalue()


def big_zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("megatron/core/__init__.py", "#" * 5_000_000)
    return stream.getvalue()


def linked_zip() -> bytes:
    stream = io.BytesIO(zip_of(FILES))
    with zipfile.ZipFile(stream, "a") as archive:
        link = zipfile.ZipInfo("megatron/core/linked.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return stream.getvalue()


def twice_zip() -> bytes:
    stream = io.BytesIO(zip_of(FILES))
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("megatron/core/./__init__.py", "import evil")
        archive.writestr("megatron/core/__init__.py", "import evil")
    return stream.getvalue()


def bulky_zip() -> bytes:
    """Less than 1 MB, 150 MB unpacked, in a member that the contract does not read."""
    stream = io.BytesIO(zip_of(FILES))
    with (
        zipfile.ZipFile(stream, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("megatron/core/data.bin", "w") as member,
    ):
        for _ in range(150):
            member.write(bytes(1_000_000))
    return stream.getvalue()


BAD_WHEELS = {
    "another project": (zip_of({"numpy-1.dist-info/METADATA": "Name: numpy\n"}), NotMegatronError),
    "truncated": (zip_of(FILES)[:-2000], BrokenSourceError),
    "not a zip": (b"hello", BrokenSourceError),
    "empty": (b"", BrokenSourceError),
    "climbs out": (zip_of({**FILES, "../../evil.py": "x"}), UnsafeArchiveError),
    "absolute": (zip_of({**FILES, "/etc/evil.py": "x"}), UnsafeArchiveError),
    "windows path": (zip_of({**FILES, "C:/evil.py": "x"}), UnsafeArchiveError),
    "binary source": (zip_of({**FILES, "megatron/core/x.py": b"\xff\xfe\x00"}), BrokenSourceError),
    "bomb": (big_zip(), SourceTooLargeError),
    "bulky": (bulky_zip(), SourceTooLargeError),
    "link": (linked_zip(), UnsafeArchiveError),
    "two members of one name": (twice_zip(), UnsafeArchiveError),
}  # fmt: skip


@pytest.mark.parametrize(("data", "error"), BAD_WHEELS.values(), ids=BAD_WHEELS)
def test_bad_wheels_are_refused_in_words(tmp_path, data, error):
    path = tmp_path / "megatron_core-0.18.0-py3-none-any.whl"
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        extract(read_wheel(path))
    assert path.name in caught.value.problem
    assert str(tmp_path) not in str(caught.value)
    assert caught.value.next_step
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "megatron_core-0.18.0-py3-none-any.whl"
    with path.open("wb") as stream:
        stream.truncate(500_000_000)  # sparse: takes no room on disk
    with pytest.raises(SourceTooLargeError, match="500 MB"):
        read_wheel(path)


def test_sdists_with_links_or_climbing_members_are_refused(tmp_path):
    path = tmp_path / "megatron_core-0.18.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("megatron_core-0.18.0/../../evil.py"))
    with pytest.raises(UnsafeArchiveError):
        read_sdist(path)
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("megatron_core-0.18.0/megatron/core/__init__.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(NotMegatronError):
        read_sdist(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BrokenSourceError):
        read_sdist(path)


def sdist_of(path: Path, *members: tarfile.TarInfo, **files: str) -> Path:
    texts = {**{name: text for name, text in FILES.items() if "dist-info" not in name}, **files}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts.items():
            info = tarfile.TarInfo(f"megatron_core-0.18.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(f"megatron_core-0.18.0/{name}")
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (member("a", tarfile.SYMTYPE, "/etc/passwd"), UnsafeArchiveError),
        (member("a/b", tarfile.SYMTYPE, "../../../x"), UnsafeArchiveError),
        (member("a", tarfile.LNKTYPE, "../x"), UnsafeArchiveError),
        (member("a", tarfile.FIFOTYPE), UnsafeArchiveError),
        (member("data.bin", size=150_000_000), SourceTooLargeError),
    ],
    ids=["absolute link", "climbing link", "hard link", "pipe", "bulky"],
)
def test_sdists_with_odd_members_are_refused(tmp_path, bad, error):
    path = sdist_of(tmp_path / "megatron_core-0.18.0.tar.gz", bad)
    with pytest.raises(error, match=r"megatron_core-0\.18\.0\.tar\.gz"):
        read_sdist(path)


def test_reading_an_sdist_runs_nothing_of_it(tmp_path):
    mark = tmp_path / "ran"
    run = f"open({str(mark)!r}, 'w').close()\n"
    backend = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    files = {"setup.py": run, "backend.py": run, "pyproject.toml": backend, "megatron/core/__init__.py": run}
    inside = member("megatron/core/linked.py", tarfile.SYMTYPE, "__init__.py")
    path = sdist_of(tmp_path / "megatron_core-0.18.0.tar.gz", inside, **files)
    extract(open_candidate(parse_candidate(str(path)), ()))
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["folder", "wheel"])
def test_reading_a_folder_or_a_wheel_runs_nothing_of_it(tmp_path, kind, monkeypatch):
    mark = tmp_path / "ran"
    run = f"open({str(mark)!r}, 'w').close()\n"
    added = ("setup.py", "conftest.py", "sitecustomize.py", "megatron/__init__.py", "megatron/core/__init__.py")
    files = {**FILES, **dict.fromkeys(added, run), "evil.pth": f"import os; {run}"}
    if kind == "wheel":
        path = write_wheel(tmp_path / "megatron_core-0.18.0-py3-none-any.whl", files)
    else:
        path = tmp_path / "checkout"
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text, encoding="utf-8")
        monkeypatch.chdir(path)  # what is read must not be imported from the working directory either
    extract(open_candidate(parse_candidate(str(path)), ()))
    assert not mark.exists()


EXTRAS = {
    "evil.pth": "start-up file evil.pth",
    "sitecustomize.py": "start-up file sitecustomize.py",
    "torch/__init__.py": "top-level name torch",
    "helper.py": "top-level name helper.py",
    "megatron_core-0.18.0.data/purelib/torch/nn.py": "top-level name torch",
    "megatron_core-0.18.0.data/platlib/late.pth": "start-up file late.pth",
    "megatron_core-0.18.0.data/scripts/python": "scripts python",
    "megatron_core-0.18.0.data/data/etc/x.conf": "data etc/x.conf",
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_a_wheel_installs_beside_megatron_is_reported(tmp_path, name):
    path = write_wheel(tmp_path / "megatron_core-0.18.0-py3-none-any.whl", {**FILES, name: "import os\n"})
    found = compare_contracts(EXPECTED, extract(read_wheel(path)), RULES)
    assert [(f.rule.id, f.detail) for f in found if f.state is FindingState.NEW] == [("package-extras", EXTRAS[name])]


def test_entry_points_are_reported(tmp_path):
    text = "[pytest11]\nplugin = megatron.plugin\n# note\n[console_scripts]\nrun = megatron.run:main\n"
    files = {**FILES, "megatron_core-0.18.0.dist-info/entry_points.txt": text}
    path = write_wheel(tmp_path / "megatron_core-0.18.0-py3-none-any.whl", files)
    assert read_wheel(path).extras == (
        "entry point console_scripts: run = megatron.run:main",
        "entry point pytest11: plugin = megatron.plugin",
    )


def test_links_out_of_a_folder_are_not_followed(tmp_path):
    folder = write_tree(tmp_path / "tree")
    (tmp_path / "secret.py").write_text("class GPTModel: pass\n")
    target = folder / "megatron/core/models/gpt/gpt_model.py"
    target.unlink()
    target.symlink_to(tmp_path / "secret.py")
    assert "megatron/core/models/gpt/gpt_model.py" not in read_directory(folder).files


def test_a_syntax_error_inside_the_candidate_names_its_line():
    with pytest.raises(CandidateSyntaxError, match=r"gpt_model\.py:\d+ in fake"):
        extract(edited(("class GPTModel(LanguageModule):", "class GPTModel(LanguageModule:")))


@pytest.mark.parametrize("ref", ["no-such-branch", "--upload-pack=evil", "v1^{tree}", "0" * 40])
def test_refs_that_do_not_exist(repository, ref):
    with pytest.raises(GitError, match="has no commit"):
        read_git(repository, ref)


def test_a_repository_of_something_else(tmp_path):
    run_git(tmp_path, "init", "-q", "other")
    (tmp_path / "other" / "README").write_text("x")
    run_git(tmp_path / "other", "add", "-A")
    run_git(tmp_path / "other", "commit", "-q", "-m", "x")
    with pytest.raises(NotMegatronError):
        read_git(tmp_path / "other", "HEAD")


def test_a_repository_s_own_hooks_and_settings_run_nothing(repository, tmp_path):
    trace = tmp_path / "ran"
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {trace}\n")
    hook.chmod(0o755)
    run_git(repository, "config", "core.fsmonitor", f"touch {trace}")
    read_git(repository, "main")
    assert not trace.exists()


def test_commits_that_touch_megatron_core(repository):
    (repository / "README").write_text("x")
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-q", "-m", "a text")
    (repository / "megatron/core/package_info.py").write_text("MAJOR = 1\n")
    run_git(repository, "commit", "-q", "-a", "-m", "a change")
    assert commits_between(repository, "v1", "main") == [run_git(repository, "rev-parse", "main")]
    with pytest.raises(GitError, match="ancestor"):
        commits_between(repository, "main", "v1")


@pytest.mark.parametrize(
    "text", ["", "numpy==1.26", "megatron-core", "megatron-core>=0.18", "megatron-core==0.18.*", "no/such/file.whl",
             "git+file:///nowhere@main", "git+ftp://host/x@main", "0.18.0; rm -rf"],
)  # fmt: skip
def test_what_names_nothing_is_refused(tmp_path, text):
    with pytest.raises(SourceError) as caught:
        parse_candidate(text, tmp_path)
    assert isinstance(caught.value, NoSuchCandidateError)


@pytest.mark.parametrize(
    ("text", "label"),
    [("0.18.2", "0.18.2"), ("megatron-core==0.18.0rc1", "0.18.0rc1"), ("megatron_core==0.1.0+vendor", "0.1.0+vendor"),
     ("git+https://host/org/Megatron-LM.git@feature/x", "Megatron-LM@feature/x"),
     ("git+ssh://git@host/org/Megatron-LM@core_v0.19.0", "Megatron-LM@core_v0.19.0")],
)  # fmt: skip
def test_labels_of_candidates(tmp_path, text, label):
    assert parse_candidate(text, tmp_path).label == label


def test_what_has_to_be_built_is_named_for_the_installer(repository, tmp_path):
    """Installers may be told to build nothing but what is named; a wheel needs no name."""
    wheel = write_wheel(tmp_path / "megatron_core-0.18.0-py3-none-any.whl")
    assert parse_candidate(str(wheel)).requirement == str(wheel)
    for text in (str(repository), f"git+file://{repository}@v1", "git+https://host/x/y@main"):
        assert parse_candidate(text).requirement.startswith("megatron-core @ ")
