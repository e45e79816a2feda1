"""Children: limits, cancellation, nothing left running, and no secret in their environment."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness_builders as build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_compat.provision.child_env import cell_environment, installer_environment
from mcore_compat.provision.process import Limits, run_logged

GRANDCHILD = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(child.pid, flush=True); "
)


DAEMON = """
import os, sys, time
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            os.execv("/bin/sleep", ["a-daemon", "60"])
        os._exit(0)
    time.sleep(0.3)
"""


def run(code, tmp_path, limit_s=20.0, cancel=None, on_tick=None, limits=None):
    return run_logged(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        log=tmp_path / "log",
        limit_s=limit_s,
        cancel=cancel or threading.Event(),
        on_tick=on_tick,
        **({"limits": limits} if limits else {}),
    )


def gone(pid):
    """Whether the process has ended; a zombie that nobody has collected has."""
    for _ in range(50):
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            if status.rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_output_and_status(tmp_path):
    done = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)", tmp_path)
    assert (done.returncode, done.timed_out, done.cancelled) == (5, False, False)
    assert {"out", "err"} == set(done.output.split())


def test_a_grandchild_does_not_outlive_a_child_that_ends(tmp_path):
    done = run(GRANDCHILD, tmp_path)
    assert done.returncode == 0
    assert gone(int(done.output))


def test_the_limit_kills_the_whole_group(tmp_path):
    done = run(GRANDCHILD + "time.sleep(60)", tmp_path, limit_s=1.0)
    assert done.timed_out
    assert done.seconds < 10
    assert gone(int(done.output))


def test_a_child_that_ignores_the_polite_signal_dies(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    done = run(code, tmp_path, limit_s=1.0)
    assert (done.timed_out, done.returncode) == (True, -9)


def test_cancelling_kills(tmp_path):
    cancel = threading.Event()
    done = run("import time; time.sleep(60)", tmp_path, cancel=cancel, on_tick=cancel.set)
    assert done.cancelled
    assert done.returncode < 0


def test_a_daemon_that_left_its_session_is_killed_and_told(tmp_path):
    done = run(DAEMON + "daemon()", tmp_path)
    assert done.returncode == 0
    assert gone(int(done.output))
    assert done.left_behind == ("a-daemon 60",)


def test_what_ends_by_itself_is_not_told(tmp_path):
    done = run("import subprocess; subprocess.Popen(['/bin/sleep', '0.2'])", tmp_path)
    assert done.left_behind == ()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_ends_with_the_harness(tmp_path, number):
    """However the harness dies, neither the suite nor its daemons go on."""
    code = DAEMON + "daemon(); print(os.getpid(), flush=True); time.sleep(60)"
    harness = (
        "import os, sys, threading; from pathlib import Path; from mcore_compat.provision.process import run_logged; "
        f"run_logged([sys.executable, '-c', {code!r}], cwd=Path({str(tmp_path)!r}), env=dict(os.environ), "
        f"log=Path({str(tmp_path / 'log')!r}), limit_s=60, cancel=threading.Event())"
    )
    process = subprocess.Popen([sys.executable, "-c", harness])
    pids = []
    for _ in range(300):
        pids = (tmp_path / "log").read_text(encoding="utf-8").split() if (tmp_path / "log").exists() else []
        if len(pids) == 2:
            break
        time.sleep(0.1)
    process.send_signal(number)
    process.wait()
    assert [gone(int(pid)) for pid in pids] == [True, True]


def test_everything_ends_though_the_supervisor_was_killed(tmp_path):
    code = DAEMON + "daemon(); import signal; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    done = run(code, tmp_path)
    assert (done.returncode, done.seconds < 20) == (-9, True)
    assert gone(int(done.output))


def test_a_fork_bomb_is_bounded_and_told(tmp_path):
    code = (
        "import os, time\n"
        "for _ in range(7):\n    os.fork()\n"
        "for _ in range(20):\n    time.sleep(0.2)\n    if os.getpid() % 3 == 0: os.fork()\n"
    )
    done = run(code, tmp_path, limits=Limits(processes=40))
    assert "the limit is 40" in done.excess
    assert done.seconds < 15


def test_a_flood_of_output_is_bounded_on_disk(tmp_path):
    code = "import os\nfor _ in range(64): os.write(1, b'x' * (1 << 20))\nos.write(1, b'the end')"
    done = run(code, tmp_path, limits=Limits(log_bytes=1 << 20))
    assert done.returncode == 0
    assert (tmp_path / "log").stat().st_size < 3 << 20
    assert "bytes of output were left out" in done.output
    assert done.output.endswith("the end")


def test_one_file_cannot_fill_the_disk(tmp_path):
    code = "open('big', 'wb').write(b'x' * (4 << 20))"
    done = run(code, tmp_path, limits=Limits(file_bytes=1 << 20))
    assert done.returncode == 1
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_a_command_that_cannot_be_started_ends_at_once(tmp_path):
    done = run_logged(
        ["/nowhere/python"], cwd=tmp_path, env={}, log=tmp_path / "log", limit_s=20, cancel=threading.Event()
    )
    assert done.returncode == 127
    assert "cannot be started" in done.output


SECRETS = ["GITHUB_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "UV_PUBLISH_TOKEN", "UV_INDEX_X_PASSWORD", "PYTHONPATH",
           "PYTHONSTARTUP", "VIRTUAL_ENV", "LD_PRELOAD", "NETRC", "SSH_AUTH_SOCK", "PYTHONHOME"]  # fmt: skip


@given(st.dictionaries(st.one_of(st.sampled_from(SECRETS), st.from_regex(r"[A-Z_]{1,20}", fullmatch=True)), st.text()))
def test_only_the_listed_variables_pass(tmp_path_factory, host):
    home = tmp_path_factory.getbasetemp()
    inside = cell_environment(host, build.cell(), home=home, temporary=home, extra={"TOLD": "1"})
    unchanged = {"CC", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CXX", "LD_LIBRARY_PATH", "PATH", "TZ"}
    ours = {
        "PYTHONPYCACHEPREFIX",
        "HOME",
        "TMPDIR",
        "LANG",
        "LC_ALL",
        "PYTHONNOUSERSITE",
        "OMP_NUM_THREADS",
        "NO_VCS_VERSION",
        "TOLD",
    }
    assert set(inside) <= unchanged | ours | {"NVIDIA_VISIBLE_DEVICES", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
    assert inside["HOME"] == str(home)
    assert not set(installer_environment(host)) & set(SECRETS)


def test_the_cells_own_variables_win():
    env = [{"name": "OMP_NUM_THREADS", "value": "4", "reason": "because of this test"}]
    inside = cell_environment({}, build.cell(env=env), home=Path("h"), temporary=Path("t"))
    assert inside["OMP_NUM_THREADS"] == "4"
    assert inside["PYTHONNOUSERSITE"] == "1"


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "UV_OFFLINE", "SSL_CERT_FILE"])
def test_the_installer_reaches_the_index(name):
    assert installer_environment({name: "x"})[name] == "x"
