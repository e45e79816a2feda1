"""uv's refusals in one line, and whose fault they are."""

import os
import stat
from pathlib import Path

import pytest

from mcore_compat.errors import MissingToolError
from mcore_compat.provision.uv import Uv, UvFailure, shortened

CONFLICT = """error: No solution found when resolving dependencies
  cause: Because megatron-core==0.13.1 depends on numpy<2.0.0 and you require numpy>=2.4, we can conclude that your
requirements are unsatisfiable.

hint: something
"""
BUILD = """error: Failed to build `megatron-core==0.12.3`
  cause: The build backend returned an error
  cause: Call to `setuptools.build_meta.build_wheel` failed (exit status: 1)

[stderr]
  error: command 'g++' failed: No such file or directory
"""
NETWORK = """error: Failed to fetch: `https://index/simple/megatron-core/`
  cause: error sending request for url (https://index/simple/megatron-core/)
  cause: client error (Connect)
  cause: dns error: failed to lookup address information
"""


@pytest.mark.parametrize(
    ("output", "words", "host"),
    [
        (CONFLICT, "megatron-core==0.13.1 depends on numpy<2.0.0", False),
        (BUILD, "command 'g++' failed", False),
        (NETWORK, "dns error", True),
        ("error: Network connectivity is disabled, but the requested data wasn't found in the cache", "disabled", True),
        ("error: failed to write: No space left on device (os error 28)", "No space left", True),
        ("", "no reason given", False),
        ("something else entirely", "something else entirely", False),
    ],
)
def test_a_refusal_in_one_line(output, words, host):
    failure = UvFailure(output)
    assert words in failure.reason
    assert "\n" not in failure.reason
    assert failure.host_at_fault is host


ODD_BUILD = """  \u00d7 Failed to build `megatron-core @ file:///candidate`
  ├─▶ The build backend returned an error
  ╰─▶ Call to `setuptools.build_meta.build_wheel` failed (exit status: 1)

      [stdout]
      running build

      [stderr]
      Traceback (most recent call last):
        File "<string>", line 7, in <module>
      SystemExit: set MEGATRON_ARCH first

      hint: This usually indicates a problem with the package or the build environment.
"""


def test_a_build_backend_is_quoted_in_its_own_words_and_in_full():
    failure = UvFailure(ODD_BUILD)
    assert failure.reason.endswith("the build said: SystemExit: set MEGATRON_ARCH first")
    assert "Failed to build `megatron-core" in failure.reason
    assert failure.output == ODD_BUILD


def test_a_build_backend_leaves_no_process_behind(tmp_path):
    uv = fake_uv(tmp_path, f"setsid sleep 61 & echo $! > {tmp_path}/pid\nexit 0")
    uv.call(["pip", "install"])
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert not Path(f"/proc/{pid}").exists()


def test_long_reasons_are_cut():
    assert len(shortened("error: " + "x" * 5000)) == 400


def fake_uv(tmp_path, script):
    path = tmp_path / "uv"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Uv(path, {"PATH": os.environ["PATH"]})


def test_output_and_refusal(tmp_path):
    assert fake_uv(tmp_path, 'echo "$@"').call(["pip", "list"]) == "pip list\n"
    with pytest.raises(UvFailure, match="no"):
        fake_uv(tmp_path, "echo 'error: no' >&2; exit 2").call(["pip"])


def test_links_need_one_filesystem(tmp_path):
    uv = fake_uv(tmp_path, f"echo {tmp_path}/cache")
    assert uv.shares_disk_with(tmp_path / "not" / "yet" / "there")
    assert not uv.shares_disk_with(Path("/proc"))


def test_a_missing_interpreter_is_named_with_a_remedy(tmp_path):
    uv = fake_uv(tmp_path, "echo 'error: No interpreter found for Python 3.11' >&2; exit 2")
    with pytest.raises(MissingToolError, match=r"No Python 3\.11") as caught:
        uv.interpreter("3.11")
    assert "uv python install 3.11" in caught.value.next_step
    assert caught.value.exit_code == 3


def test_an_interpreter_beside_a_shim_that_leads_nowhere(tmp_path):
    """uv stops at a shim of pyenv whose version is not activated; the newest of that version is taken itself."""
    for version in ("3.11.7", "3.11.12", "3.1.9", "3.110.1"):
        (tmp_path / "versions" / version / "bin").mkdir(parents=True)
        (tmp_path / "versions" / version / "bin" / f"python{version.rpartition('.')[0]}").touch()
    refusing = fake_uv(tmp_path, "echo 'pyenv: python3.11: command not found' >&2; exit 2")
    uv = Uv(refusing.executable, {**refusing.env, "PYENV_ROOT": str(tmp_path)})
    assert uv.interpreter("3.11") == tmp_path / "versions/3.11.12/bin/python3.11"
    with pytest.raises(MissingToolError, match=r"No Python 3\.9 "):
        uv.interpreter("3.9")


def test_a_missing_uv_is_named_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(MissingToolError, match="uv was not found"):
        Uv.find({"PATH": str(tmp_path)})
    fake_uv(tmp_path, "echo 'pyenv: uv: command not found' >&2; exit 127")
    with pytest.raises(MissingToolError, match="uv does not run: pyenv"):
        Uv.find({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    (tmp_path / "uv").unlink()
    with pytest.raises(MissingToolError, match="cannot be started"):
        Uv(tmp_path / "uv", {}).call(["--version"])
