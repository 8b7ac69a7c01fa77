"""A run opens no port to the network, and writes down no secret of the machine that it runs on."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import render_with_cookiecutter

SMOKE = ["smoke", "--epochs", "1", "--optim.warmup-epochs", "0", "--data.limit", "192"]
# As /proc/net writes them: 127.0.0.1, ::1, and 127.0.0.1 among the addresses of IPv6.
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
SECRETS = {
    name: f"planted-{number}-{name.lower()}"
    for number, name in enumerate(
        (
            "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
            "GITHUB_TOKEN", "PGPASSWORD", "DATABASE_URL", "SSH_AUTH_SOCK", "http_proxy",
        )
    )
}  # fmt: skip
# Three more: in git's remote, in a flag's value, and in a URL of the command line.
REMOTE, FLAG, URL = "planted-remote", "planted-flag", "planted-url"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project in git, whose remote holds a token, as those of CI jobs do."""
    folder = render_with_cookiecutter(tmp_path_factory.mktemp("project") / "output")
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message=all"],
        ["remote", "add", "origin", f"https://oauth2:{REMOTE}@example.com/a.git"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    (folder / "README.md").write_text("changed since")
    return folder


def test_one_process_opens_no_socket_and_writes_no_secret(project):
    # Called as a service would: with words of its own before those of the run.
    caller = "import sys; from image_classifier.cli import main; sys.exit(main(sys.argv[4:]))"
    own = [f"--api-key={FLAG}", f"https://me:{URL}@example.com/hook", "--"]
    words = ["-c", caller, *own, "train", *SMOKE]
    environment = {"PYTHONPATH": str(project / "src"), **SECRETS}
    assert sockets_during(words, project, environment) == set()
    files = [path for path in (project / "runs").rglob("*") if path.is_file()]
    wanted = {"environment.json", "config.json", "last.pt", "report.html"}
    assert wanted <= {path.name for path in files}
    planted = [*SECRETS.values(), REMOTE, FLAG, URL]
    assert len(planted) == 12
    for path in files:
        content = path.read_bytes()
        assert not [secret for secret in planted if secret.encode() in content], path


def test_processes_of_one_machine_talk_on_loopback_alone(project):
    found = sockets_during(["train.py", *SMOKE, "--run.processes", "2"], project, {})
    assert found  # gloo's
    assert found <= set(LOOPBACK)


def test_an_open_port_would_be_seen(tmp_path):
    code = "import socket, time; s = socket.create_server(('', 0)); time.sleep(1)"
    assert sockets_during(["-c", code], tmp_path, {}) == {"00000000"}


def sockets_during(words, folder, environment):
    """Local addresses of all internet sockets of a Python and its children, while it runs."""
    found = set()
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        while process.poll() is None:
            found |= addresses({inode for pid in family(process.pid) for inode in sockets(pid)})
            time.sleep(0.05)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode == 0, said
    return found


def family(pid):
    """A process and all that it has started."""
    yield pid
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from family(int(child))


def sockets(pid):
    """The inodes of a process's sockets, of every kind."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    yield target[8:-1]


def addresses(inodes):
    """The local addresses of those that are of the internet's kinds."""
    if not inodes:
        return set()
    rows = [
        line.split()
        for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
        if (table := Path("/proc/net", kind)).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[9] in inodes}
