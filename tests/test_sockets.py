"""A run opens no port to the network, and writes down no secret of the machine that it runs on."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from conftest import PROJECT, SMOKE, processes_with, run

# As /proc/net writes them: 127.0.0.1, ::1, and 127.0.0.1 among the addresses of IPv6.
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
SECRETS = "WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN GITHUB_TOKEN PGPASSWORD"
SECRETS += " DATABASE_URL SSH_AUTH_SOCK http_proxy"


def test_one_process_opens_no_socket_and_writes_no_secret(render):
    project = render()
    # In git, whose remote holds a token, as those of CI jobs do.
    for words in (
        "init",
        "add .",
        "-c user.name=a -c user.email=a@b.c commit --message=all",
        "remote add origin https://oauth2:planted-remote@example.com/a.git",
    ):
        run("git", *words.split(), folder=project)
    (project / "README.md").write_text("changed since")
    # Called as a service would: with words of its own before those of the run.
    caller = "import sys; from image_classifier.cli import main; sys.exit(main(sys.argv[4:]))"
    own = ["--api-key=planted-flag", "https://me:planted-url@example.com/hook", "--"]
    secrets = {name: f"planted-{name}" for name in SECRETS.split()}
    words = ["-c", caller, *own, "train", *SMOKE.split()]
    assert sockets_during(words, project, PYTHONPATH=project / "src", **secrets) == set()
    files = [path for path in (project / "runs").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"environment.json", "config.json", "last.pt", "report.html"} <= names
    assert not [path for path in files if b"planted-" in path.read_bytes()]


def test_processes_of_one_machine_talk_on_loopback_alone(tmp_path):
    words = [PROJECT / "train.py", *SMOKE.split(), "--run.processes", "2"]
    found = sockets_during(words, tmp_path)
    assert found  # gloo's
    assert found <= LOOPBACK


def test_an_open_port_would_be_seen(tmp_path):
    code = "import socket, time; s = socket.create_server(('', 0)); time.sleep(1)"
    assert sockets_during(["-c", code], tmp_path) == {"00000000"}


def sockets_during(words, folder, **environment):
    """Local addresses of all internet sockets of a Python and its children, while it runs."""
    found = set()
    tables = [path for kind in ("tcp", "udp", "raw") for path in Path("/proc/net").glob(f"{kind}*")]
    environment = os.environ | environment | {"WATCHED": folder}
    with subprocess.Popen([sys.executable, *words], cwd=folder, env=environment) as process:
        while process.poll() is None:
            links = {link for one in processes_with(f"WATCHED={folder}\0") for link in sockets(one)}
            for table in tables if links else ():
                rows = [line.split() for line in table.read_text().splitlines()[1:]]
                found |= {row[1].partition(":")[0] for row in rows if f"socket:[{row[9]}]" in links}
            time.sleep(0.05)
        assert process.returncode == 0
    return found


def sockets(process):
    """The sockets, of every kind, of a process in /proc."""
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if (link := os.readlink(descriptor)).startswith("socket:"):
                    yield link
