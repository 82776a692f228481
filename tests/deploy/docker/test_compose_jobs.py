"""The jobs of compose.yaml: identities are made once, renewed in time, and let in."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from protofed.common.errors import ConfigError, DeniedError
from protofed.common.pki.identity import Party, read_certificate, read_identity

JOBS = Path(__file__).parents[3] / "deploy" / "docker" / "compose"
SITES = ("site-1", "site-2")
HOSTS = ("server", "localhost", "127.0.0.1")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their own
    spec.loader.exec_module(module)
    return module


certificates, admission, replica = load("certificates"), load("admission"), load("replica")


def run(folder: Path, now: datetime = NOW, hosts: tuple[str, ...] = HOSTS) -> None:
    for name in ("ca", "server", "operator", *SITES):
        (folder / name).mkdir(exist_ok=True)
    certificates.Job(folder, SITES, hosts, now).run()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def own(folder: Path, name: str) -> Any:
    return read_certificate((folder / name / "cert.pem").read_bytes(), name)


def test_everybody_gets_an_identity_and_no_key_moves(tmp_path: Path) -> None:
    run(tmp_path)
    assert read_identity(tmp_path / "server", Party.SERVER, NOW).certificate.hosts == HOSTS
    assert read_identity(tmp_path / "operator", Party.OPERATOR, NOW).certificate.name == "operator"
    for site in SITES:
        assert read_identity(tmp_path / site, Party.SITE, NOW).certificate.name == site
        assert not (tmp_path / site / "ca-key.pem").exists()
    found = files(tmp_path)
    assert found["server/operators/operator.pem"] == found["operator/cert.pem"]
    for site in SITES:
        assert found[f"operator/admit/{site}.pem"] == found[f"{site}/cert.pem"]
    keys = [data for data in found.values() if b"PRIVATE KEY" in data]
    assert len(keys) == len(set(keys)) == len(("ca", "server", "operator", *SITES))


def test_once_more_changes_nothing_until_a_month_before_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    before = files(tmp_path)
    capsys.readouterr()
    run(tmp_path, NOW + timedelta(days=334))
    assert files(tmp_path) == before
    assert capsys.readouterr().out.count(": kept;") == 2 + len(SITES)
    later = NOW + timedelta(days=336)
    run(tmp_path, later)
    after = files(tmp_path)
    for name in ("server", "operator", *SITES):
        assert after[f"{name}/key.pem"] != before[f"{name}/key.pem"]
        assert own(tmp_path, name).not_after > later + timedelta(days=360)
    assert after["ca/ca.pem"] == before["ca/ca.pem"]
    assert after["operator/previous/key.pem"] == before["operator/key.pem"]
    assert after["operator/admit/operator.pem"] == after["operator/cert.pem"] != before["operator/cert.pem"]
    assert after["server/operators/operator.pem"] == after["operator/cert.pem"]


def test_a_server_with_other_names_gets_another_certificate(tmp_path: Path) -> None:
    run(tmp_path)
    before = files(tmp_path)
    run(tmp_path, hosts=(*HOSTS, "fl.example.org"))
    assert set(own(tmp_path, "server").hosts) == {*HOSTS, "fl.example.org"}
    changed = {name for name, data in files(tmp_path).items() if data != before.get(name) and "issued" not in name}
    assert changed == {"server/cert.pem", "server/key.pem"}


def test_a_job_that_was_interrupted_begins_again(tmp_path: Path) -> None:
    run(tmp_path)
    for name in ("ca/ca.pem", "site-1/cert.pem"):
        (tmp_path / name).unlink()
    for name in ("server", "operator", "site-2"):
        (tmp_path / name / "cert.pem").unlink()
        (tmp_path / name / "ca.pem").unlink()
    (tmp_path / "site-1" / "ca.pem").unlink()
    run(tmp_path)
    for site in SITES:
        read_identity(tmp_path / site, Party.SITE, NOW)


class Server:
    """Lets operators in whose certificate it knows."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.revoked: set[bytes] = set()
        self.roles: dict[str, list[str]] = {}

    def operator(self, _server: str, identity: Path) -> Any:
        return _Connection(self, (identity / "cert.pem").read_bytes())


class _Connection:
    def __init__(self, server: Server, own: bytes) -> None:
        self.server, self.own = server, own

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def register(self, pem: str, roles: Sequence[str], *, renewal: bool) -> None:
        if self.own not in self.server.known:
            raise DeniedError("not registered here")
        if pem.encode() in self.server.revoked:
            raise ConfigError("was revoked")
        self.server.known.add(pem.encode())
        self.server.roles[read_certificate(pem.encode(), "pem").name] = list(roles)
        assert renewal  # or a site whose certificate this job renewed would be kept out


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(admission, "Operator", made.operator)
    return made


def test_the_evaluator_is_let_in_as_such(tmp_path: Path, server: Server) -> None:
    (tmp_path / "evaluator").mkdir()
    for name in ("ca", "server", "operator"):
        (tmp_path / name).mkdir()
    certificates.Job(tmp_path, ["evaluator"], HOSTS, NOW).run()
    server.known.add(files(tmp_path)["operator/cert.pem"])
    admission.admit("server:7443", tmp_path / "operator")
    assert server.roles["evaluator"] == ["evaluator"]


def test_a_folder_with_somebody_elses_certificate_is_not_renewed(tmp_path: Path) -> None:
    run(tmp_path)
    for name in ("cert.pem", "key.pem"):
        (tmp_path / "site-1" / name).write_bytes((tmp_path / "operator" / name).read_bytes())
    with pytest.raises(ConfigError, match="request for operator 'operator'; expected one for site 'site-1'"):
        run(tmp_path, NOW + timedelta(days=336))


def test_a_renewed_operator_is_let_in_by_the_one_it_was(tmp_path: Path, server: Server) -> None:
    run(tmp_path)
    server.known.add(files(tmp_path)["operator/cert.pem"])
    run(tmp_path, NOW + timedelta(days=336))
    admission.admit("server:7443", tmp_path / "operator")
    assert {files(tmp_path)[f"{name}/cert.pem"] for name in ("operator", *SITES)} < server.known


def test_everybody_is_let_in_by_an_operator_whom_the_server_knows(tmp_path: Path, server: Server) -> None:
    run(tmp_path)
    with pytest.raises(DeniedError, match="not registered"):
        admission.admit("server:7443", tmp_path / "operator")
    assert server.known == set()
    found = files(tmp_path)
    server.known.add(found["operator/cert.pem"])
    admission.admit("server:7443", tmp_path / "operator")
    assert server.known == {found[f"{name}/cert.pem"] for name in ("operator", *SITES)}
    # None for a site: a trainer at first, and later what the operator made of it.
    assert server.roles == {"operator": ["operator"], **{site: [] for site in SITES}}


def test_a_site_that_was_revoked_stays_out_and_keeps_nobody_else_out(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    found = files(tmp_path)
    server.known.add(found["operator/cert.pem"])
    server.revoked.add(found["site-1/cert.pem"])
    admission.admit("server:7443", tmp_path / "operator")
    assert server.known == {found["operator/cert.pem"], found["site-2/cert.pem"]}
    assert "site-1: not registered: was revoked" in capsys.readouterr().out


def test_each_replica_of_the_service_client_gets_a_key_of_its_own_and_is_let_in(tmp_path: Path) -> None:
    for name in ("ca", "server", "operator", "clients"):
        (tmp_path / name).mkdir()
    for clients in (2, 3):  # more of them later
        before = files(tmp_path)
        certificates.Job(tmp_path, (), HOSTS, NOW, clients).run()
    found = files(tmp_path)
    assert {name: found[name] for name in before} == before
    for site in ("client-1", "client-2", "client-3"):
        assert read_identity(tmp_path / "clients" / site, Party.SITE, NOW).certificate.name == site
        assert found[f"operator/admit/{site}.pem"] == found[f"clients/{site}/cert.pem"]
    keys = [data for data in found.values() if b"PRIVATE KEY" in data]
    assert len(keys) == len(set(keys)) == 6


REPLICA = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("replica", sys.argv[1])
replica = importlib.util.module_from_spec(spec)
spec.loader.exec_module(replica)
print(replica.take(pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]), flush=True)
sys.stdin.read()
"""


class Containers:
    """Replicas as processes of their own: each keeps its site until it ends."""

    def __init__(self, states: Path, clients: int) -> None:
        self.states, self.clients = states, clients
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str) -> str:
        """The number that it takes; its last words, if there is none."""
        command = [sys.executable, "-c", REPLICA, str(JOBS / "replica.py"), str(self.states), str(self.clients), name]
        pipe = subprocess.PIPE
        one = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self.running[name] = one
        assert one.stdout is not None
        return one.stdout.readline().strip()

    def kill(self, name: str) -> None:
        one = self.running.pop(name)
        one.kill()
        one.communicate()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path, 3)
    yield made
    for name in list(made.running):
        made.kill(name)


def test_each_replica_is_a_site_of_its_own_and_one_too_many_says_what_to_set(containers: Containers) -> None:
    assert [containers.start(name) for name in ("a", "b", "c")] == ["1", "2", "3"]
    assert "set a larger CLIENTS in .env" in containers.start("d")


def test_a_container_that_is_restarted_is_the_same_site_and_a_new_one_takes_what_is_free(
    containers: Containers,
) -> None:
    assert [containers.start(name) for name in ("a", "b", "c")] == ["1", "2", "3"]
    for name in ("a", "b", "c"):
        containers.kill(name)
    assert [containers.start(name) for name in ("c", "b", "a")] == ["3", "2", "1"]
    containers.kill("b")
    assert containers.start("made anew") == "2"


def test_a_replica_has_a_name_a_share_an_identity_and_a_state_of_its_own(tmp_path: Path) -> None:
    identity, state = "/etc/protofed/identity/client-3", "/var/lib/protofed/client-3"
    own = ["--site", "client-3", "--partition-index", "2", "--identity", identity, "--state", state]
    assert replica.daemon(["client", "start"], 3) == ["protofed", "client", "start", *own]
    (tmp_path / "client-3.claim").write_text("ab12", encoding="ascii")
    assert replica.health(tmp_path, 3, "ab12")[-1] == f"{tmp_path}/client-3"
    assert replica.health(tmp_path, 3, "another")[-1] == f"{tmp_path}/client-0", "no daemon runs there"
