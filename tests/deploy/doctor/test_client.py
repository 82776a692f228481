"""`protofed client doctor` against real servers: each failure is provoked, and named right.

What the doctor sees of a site's privacy budget: each state of its ledger is provoked.
"""

from __future__ import annotations

import builtins
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.connect_proxy import ConnectProxy
from tests.support.doctor_rows import findings, rows, skipped
from tests.support.pki import Authority
from tests.support.policies import standard_with_plain_updates
from tests.support.tls_server import TlsServer, tls_server

from protofed.client.policy.dp_accountant import NoisySums
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PrivacyBudget
from protofed.client.state.daily_counts import FILE as TODAY
from protofed.client.state.daily_counts import Counted, DailyCounts
from protofed.client.state.dp_ledger import FILE, DpLedger
from protofed.client.transport import diagnosis
from protofed.client.transport.channels import BusyError
from protofed.client.transport.diagnosis import ConnectionDiagnosis, DiagnosisCode
from protofed.common.clock import utc_now
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings, read_settings
from protofed.common.errors import ConfigError, StateError, UnavailableError
from protofed.common.pki.identity import Party, read_certificate
from protofed.common.protocol.call_metadata import ServerInfo
from protofed.common.protocol.messages import Role, Task, TaskKind
from protofed.deploy import shipped
from protofed.deploy.daemons.server import ADDRESS_FILE
from protofed.deploy.doctor import client as doctor_client
from protofed.deploy.doctor import machine
from protofed.deploy.doctor.checks import CheckFailedError, CheckRow, CheckSkippedError, State
from protofed.deploy.doctor.client import ClientDoctor, ledger_message
from protofed.deploy.doctor.site import SiteUnderCheck
from protofed.server.rpc import interceptor

DAY = timedelta(days=1)
NOW = datetime.now(UTC)
Look = Callable[..., dict[str, CheckRow]]


@pytest.fixture
def tls(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path) -> Iterator[TlsServer]:
    """A server that knows site-1."""
    with tls_server(tmp_path / "identities", live_server, recipe_of("fedavg")) as made:
        made.register(made.identity("site-1", Party.SITE))
        yield made


def given(folder: Path, address: str, **changes: Any) -> dict[str, Any]:
    """What a daemon of site-1 would be started with."""
    policy = standard_with_plain_updates(folder / "policies")  # of secure aggregation: test_secure_aggregation
    told = {"site": "site-1", "server": address, "policy": policy}
    return {**told, "state": folder / "state", "data": {"source": "digits"}, **changes}


def examined(settings: dict[str, Any], site: SiteUnderCheck | None = None, clock: Any = utc_now) -> dict[str, CheckRow]:
    read = lambda: read_settings(ClientSettings, None, settings)  # noqa: E731
    return rows(ClientDoctor(read, site or SiteUnderCheck(quick=True), clock).checks())


@pytest.fixture
def look(tls: TlsServer, tmp_path: Path) -> Look:
    """The examination of site-1's daemon; settings may be changed."""

    def examine(clock: Any = utc_now, **changes: Any) -> dict[str, CheckRow]:
        known = given(tmp_path, changes.pop("server", tls.server.address), identity=tls.folder / "site-site-1")
        return examined({**known, **changes}, clock=clock)

    return examine


def issued(tls: TlsServer, **options: Any) -> Path:
    """An identity of site-1 that is not quite right, but registered where that is possible."""
    authority = options.pop("authority", tls.authority)
    folder: Path = authority.issue(tls.folder / "other", Party.SITE, options.pop("name", "site-1"), **options)
    tls.know(folder)
    return folder


def test_a_daemon_that_would_work_is_well_and_nothing_is_left_behind(
    tls: TlsServer, look: Look, tmp_path: Path
) -> None:
    look()  # writes the test's policy
    before = sorted(tmp_path.glob("*"))
    calls = tls.server.audit_file.read_bytes()
    found = look()
    assert findings(found) == []
    assert skipped(found).keys() == {"metrics", "privacy budget"}
    assert found["admission"].message.endswith("is registered there")
    assert sorted(tmp_path.glob("*")) == before
    assert tls.server.audit_file.read_bytes() == calls
    assert tls.server.ledger.sites() == {}


def test_plain_text(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    address = live_server(recipe_of("fedavg")).address
    found = examined(given(tmp_path, address, identity="none"))
    assert findings(found) == []
    assert skipped(found).keys() == {"identity", "certificate", "tls", "admission", "metrics", "privacy budget"}
    assert findings(examined(given(tmp_path, address)))[0] == ("connection", "connection-not-chosen")


@pytest.mark.parametrize(("off", "named"), [(-55, False), (-65, True), (65, True), (7300, True)])
def test_a_clock_more_than_a_minute_off(off: int, named: bool, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "utc_now", lambda: utc_now() + timedelta(seconds=off))
    found = look()
    assert findings(found) == ([("clock", "clock-wrong")] if named else [])
    if off == 7300:
        assert "2 hours behind it" in found["clock"].message


def test_a_clock_that_is_wrong_judges_no_certificate_or_lets_no_connection_stand(look: Look, tls: TlsServer) -> None:
    found = look(clock=lambda: utc_now() - timedelta(hours=2))  # an hour before the certificate begins
    assert findings(found) == [("clock", "clock-wrong")]
    assert found["certificate"].state is State.FINE
    own = read_certificate((tls.folder / "site-site-1" / "cert.pem").read_bytes(), "")
    dates, fine = (
        ConnectionDiagnosis(DiagnosisCode.SERVER_DATES, "said"),
        ConnectionDiagnosis(DiagnosisCode.FINE, "said"),
    )
    with pytest.raises(CheckFailedError) as failed:
        machine.check_clock_by_certificates(own, dates, own.not_before - 2 * DAY)
    assert failed.value.name == "clock-wrong"
    machine.check_clock_by_certificates(own, fine, own.not_before - DAY)
    machine.check_clock_by_certificates(own, dates, own.not_before + DAY)


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
def test_a_server_process_whose_clock_is_wrong(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "protofed.deploy.cli",
        "server",
        "start",
        "--identity=none",
        "--listen=127.0.0.1:0",
    ]
    known, until = tmp_path / "server" / ADDRESS_FILE, time.monotonic() + 60
    faked = {**os.environ, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    command = ["faketime", "-f", "-2d", *command, f"--state={known.parent}"]
    with subprocess.Popen(command, env=faked, start_new_session=True) as process:
        try:
            while not known.exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            found = examined(given(tmp_path, known.read_text(encoding="utf-8"), identity="none"))
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # faketime starts it as a child
    assert findings(found) == [("clock", "clock-wrong")]
    assert "2 days ahead of it" in found["clock"].message


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"begins": NOW - DAY / 30, "ends": NOW - DAY / 1000}, "certificate-expired"),
        ({"begins": NOW + DAY, "ends": NOW + 9 * DAY}, "certificate-not-yet-valid"),
        ({"ends": NOW + 20 * DAY}, "certificate-ends-soon"),
    ],
)
def test_dates_of_the_certificate(options: dict[str, Any], name: str, tls: TlsServer, look: Look) -> None:
    found = look(identity=issued(tls, **options))
    assert findings(found)[0] == ("certificate", name)
    assert found["identity"].state is State.FINE


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (shutil.rmtree, "identity-missing"),
        (lambda folder: (folder / "key.pem").unlink(), "identity-missing"),
        (lambda folder: (folder / "cert.pem").write_text("no PEM"), "identity-unreadable"),
        (lambda folder: (folder / "key.pem").chmod(0o644), "key-readable-by-others"),
        (lambda folder: (folder / "ca.pem").write_bytes(Authority.make().pem), "certificate-of-another-authority"),
    ],
)
def test_an_identity_that_cannot_be_used(spoil: Any, name: str, tls: TlsServer, look: Look) -> None:
    spoil(tls.folder / "site-site-1")
    found = look()
    assert findings(found) == [("identity", name)]
    assert skipped(found)["tls"] == "needs `server`"
    assert skipped(found)["server"] == "needs `identity`"


def test_an_identity_of_somebody_else(tls: TlsServer, look: Look) -> None:
    assert findings(look(site="site-2")) == [("identity", "identity-of-another")]
    assert findings(look(identity=tls.identity())) == [("identity", "identity-of-another")]
    key = tls.folder / "site-site-1" / "key.pem"
    key.write_bytes((tls.identity("site-2", Party.SITE) / "key.pem").read_bytes())
    assert findings(look()) == [("identity", "key-mismatch")]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "STEP_TIMEOUT_S", 0.5)


def test_nobody_there(look: Look, unused_port: int) -> None:
    found = look(server=f"127.0.0.1:{unused_port}")
    assert findings(found) == [("server", "nothing-listens")]
    assert skipped(found)["clock"] == "nothing to compare with: the server could not be asked"
    assert skipped(found)["version"] == "needs `server`"
    assert findings(look(server="nowhere.invalid:7443")) == [("server", "name-unknown")]


@pytest.mark.parametrize(("status", "name"), [(403, "proxy-refuses"), (407, "proxy-password"), (200, None)])
def test_a_proxy(status: int, name: str | None, look: Look) -> None:
    way = ConnectProxy()
    way.status = status
    found = look(proxy=f"http://127.0.0.1:{way.address.rpartition(':')[2]}")
    way.die()
    assert findings(found) == ([("server", name)] if name else [])
    assert findings(look(proxy="https://odd")) == [("server", "proxy-away")]


def test_a_proxy_of_the_environment_is_said_not_to_be_used(
    look: Look, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://ann:hunter2@127.0.0.1:1")
    said = "HTTPS_PROXY, grpc_proxy of the environment are not used: the setting `proxy` alone names a proxy"
    found = look()
    assert findings(found) == []
    assert found["server"].message.endswith(said)
    away = look(server=f"127.0.0.1:{unused_port}")
    assert findings(away) == [("server", "nothing-listens")]
    assert away["server"].message.endswith(said)
    assert "hunter2" not in str(found) + str(away)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (UnavailableError("the health check failed (unavailable: DNS resolution failed)"), "call-failed"),
        (ConfigError("gRPC would offer TLS 1.2"), "call-failed"),
        (BusyError("it does not answer a health check"), "server-busy"),
    ],
)
def test_an_error_of_this_machine_is_not_called_a_busy_server(
    error: Exception, name: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor_client, "fetch_server_info", fail)
    assert findings(look()) == [("admission", name), ("version", name)]


def test_whom_the_server_does_not_admit(tls: TlsServer, look: Look) -> None:
    both = ["trainer", "evaluator"]
    assert findings(look(roles=both)) == [("admission", "role-not-registered")]
    tls.register(tls.identity("site-1", Party.SITE), *both)
    assert findings(look(roles=both)) == []
    own = tls.authority.issue(tls.folder / "new", Party.SITE, "site-1")
    found = look(identity=own)
    assert findings(found) == [("admission", "certificate-not-registered")]
    tls.register(own, renewal=True)
    assert findings(look(identity=own)) == []
    with tls.operator() as operator:
        operator.revoke(read_certificate((own / "cert.pem").read_bytes(), "").fingerprint, "lost")
    assert findings(look(identity=own)) == [("admission", "certificate-revoked")]
    own = Authority.make().issue(tls.folder / "foreign", Party.SITE, "site-1")
    trusted = own / "ca.pem"
    trusted.write_bytes(trusted.read_bytes() + tls.authority.pem)  # it trusts the server, which does not trust it
    assert findings(look(identity=own)) == [("tls", "certificate-refused")]
    other = Authority.make()
    folder = other.issue(tls.folder / "stranger", Party.SITE, "site-1")
    found = look(identity=folder)
    assert findings(found) == [("tls", "server-authority")]
    assert skipped(found)["admission"] == "needs `tls`"


@pytest.mark.parametrize(
    ("change", "name"),
    [({"VERSION": "9.9.9"}, "version-differs"), ({"VERSION": "9.9.9", "PROTOCOL_VERSION": 3}, "protocol-mismatch")],
)
def test_a_server_of_another_version(
    change: dict[str, Any], name: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, value in change.items():
        monkeypatch.setattr(interceptor, attribute, value)
    found = look()
    assert findings(found) == [("version", name)]
    assert "server 9.9.9, protocol" in found["version"].message


def test_a_server_that_says_nothing_of_itself(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerInfo, "metadata", lambda _self: ())
    found = look()
    assert findings(found) == [("version", "protocol-mismatch")]
    assert "does not say its version" in found["version"].message
    assert skipped(found).keys() == {"clock", "admission", "metrics", "privacy budget"}


def test_what_a_policy_lets_out_or_that_it_cannot_be_read(look: Look, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    assert findings(look(policy=file)) == [("policy", "policy-missing")]
    file.write_text('metods = ["fednh"]\nparts = ["body"]\n', encoding="utf-8")
    found = look(policy=file)
    assert findings(found) == [("policy", "policy-invalid")]
    assert "did you mean 'methods'?" in found["policy"].message
    path = shipped.folder("policies") / "strict.toml"
    strict, methods = look(policy=path)["policy"].message, ", ".join(sorted(Policy.read(path).rules.methods))
    assert strict.startswith(f"methods {methods}; parts body, head, prototypes; plugins none; ")
    assert "no class under 16 examples" in strict
    assert "all that is trained in secure aggregation alone (secure = required)" in strict
    assert "0 scores, none of the site's own" in strict
    standard = look(policy=shipped.folder("policies") / "standard.toml")["policy"].message
    assert "23 scores, none of the site's own" in standard
    assert "all that is trained in secure aggregation alone (secure = required)" in standard
    open_ = look(policy=shipped.folder("policies") / "open.toml")["policy"].message
    assert "class_distribution_estimate" in open_
    assert "sums alone" not in open_
    assert "9 of the site's own: they tell its label counts" in open_
    told = {roles: look(policy="standard", roles=roles)["policy"].message for roles in (("evaluator",), tuple(Role))}
    assert [("23 of a test set that tell its label counts" in text) for text in told.values()] == [False, True]


def test_a_limit_a_day_that_is_used_up(look: Look, tmp_path: Path) -> None:
    (file := tmp_path / "policy.toml").write_text(
        'methods = ["fednh"]\nparts = ["body"]\nlimits = { tasks_per_day = 2 }\n', encoding="utf-8"
    )
    counts = DailyCounts(tmp_path / "state" / TODAY)
    (tmp_path / "state").mkdir(exist_ok=True)
    for task in ("a", "b"):
        assert findings(look(policy=file, state=tmp_path / "state")) == []
        assert counts.begin(Counted.TASKS, task, 2) is None
    found = look(policy=file, state=tmp_path / "state")
    assert findings(found) == [("policy", "today-used-up")]
    assert "2 were started today, as many as limits.tasks_per_day allows" in found["policy"].message


def test_an_evaluator_is_asked_for_no_partners(look: Look) -> None:
    found = look(policy="standard", roles=("evaluator",))
    assert skipped(found)["secure aggregation"] == "an evaluator is in no secure aggregation"
    assert "secure aggregation" not in skipped(look(policy="standard"))


BUDGET = PrivacyBudget(epsilon=4.0, delta=1e-5, unit="patient")


def spend(state: Path, fits: int = 2) -> Path:
    ledger = DpLedger(state / FILE)
    for number in range(1, fits + 1):
        task = Task(TaskKind.FIT, "run", number, f"task-{number}", Digest("a" * 64), 1, 60.0)
        ledger.spend(task, f"noise-{number}", [NoisySums(0.1, 1.5, 10)])
    return state / FILE


def refused(state: Path, budget: PrivacyBudget | None = BUDGET) -> str:
    with pytest.raises(CheckFailedError) as caught:
        ledger_message(state, budget)
    return caught.value.name


def test_a_site_says_what_it_has_spent_if_it_has_noise(tmp_path: Path) -> None:
    with pytest.raises(CheckSkippedError):
        ledger_message(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    assert "epsilon 0 of 4 is spent" in ledger_message(tmp_path, BUDGET)
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    before = spend(tmp_path).read_bytes()
    text = ledger_message(tmp_path, BUDGET)
    assert "of 4 is spent on each patient at delta 1e-05, by 2 fits; dp-accounting 0." in text
    assert "2 fits had noise" in ledger_message(tmp_path, None)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_budget_that_is_spent_is_a_warning(tmp_path: Path) -> None:
    spend(tmp_path, 60)
    assert refused(tmp_path) == "privacy-budget-spent"


def test_half_a_line_counts_and_damage_is_reported_as_the_daemon_would(tmp_path: Path) -> None:
    path = spend(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"hash":')
    assert "2 fits, and 1 half-written line" in ledger_message(tmp_path, BUDGET)
    path.write_bytes(path.read_bytes().replace(b"task-1", b"task-9"))
    with pytest.raises(StateError, match="line 1"):
        ledger_message(tmp_path, BUDGET)


def test_a_ledger_of_another_account_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert refused(tmp_path) == "privacy-ledger-unusable"


def test_without_the_accountant_the_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(tmp_path)
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError("No module named 'dp_accounting'")
        return real(name, *rest, **named)

    from protofed.client.policy import dp_accountant

    dp_accountant._epsilon.cache_clear()
    dp_accountant._losses.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    assert refused(tmp_path) == "library-missing"
