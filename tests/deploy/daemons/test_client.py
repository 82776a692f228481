"""The client daemon as its operator runs it: `protofed client start --settings FILE` and the environment."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from protofed.client.agent import metrics
from protofed.client.policy.policy import PolicyFile
from protofed.client.site import DaemonStatus
from protofed.client.transport.audit import FILE
from protofed.common.codec import digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings, Monitoring, read_settings
from protofed.common.errors import ConfigError, DataError, RevokedError
from protofed.common.protocol.messages import Activity, Finished, Task, TaskKind, Telemetry, Wait
from protofed.common.storage import journal
from protofed.deploy import shipped
from protofed.deploy.daemons import client, metrics_endpoint, signals
from protofed.testing.live_server import LiveServer

PATIENCE_S = 240.0  # an event that never comes; a machine that runs other tests is slow
RULES = (
    'methods = ["fednh"]\nparts = ["body", "head", "prototypes"]\nmetrics = ["loss"]\n'
    "limits = { min_cohort = 1 }\n"  # of `ONE_SITE`
)
ONE_SITE: dict[str, Any] = {
    "rounds": 2,
    "federation": {"min_sites": 1, "quorum": 1, "heartbeat_s": 0.05},
    "data": {"source": "digits"},
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that is silent for three seconds is away; the daemon's setting of PyTorch ends with the test."""
    monkeypatch.setattr(metrics, "ANSWERED_WITHIN_S", 3.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Watcher:
    """Runs a daemon here, where signals arrive, and looks at it from a thread; ends it when it has seen all."""

    def __init__(self, folder: Path, server: str, policy: str) -> None:
        self.folder, self.state = folder, folder / "state"
        (folder / "policy.toml").write_text(policy)
        self.settings = ClientSettings.model_validate(
            {
                "site": "ann",
                "server": server,
                "policy": folder / "policy.toml",
                "state": self.state,
                "data": {"source": "digits"},
                "device": "cpu",
                "identity": "none",
                "metrics": Monitoring(listen="127.0.0.1:0"),
            }
        )

    def watch(self, look: Callable[[], None]) -> None:
        """Fails as `look` does."""
        seen: Future[None] = Future()

        def from_beside() -> None:
            try:
                look()
                seen.set_result(None)
            except BaseException as error:
                seen.set_exception(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=from_beside, name="watcher")
        with signals.stoppable():  # should the daemon have ended by itself
            thread.start()
            client.run_client(self.settings, until_finished=False, give_up_after_s=None)
            thread.join()
        thread.join(PATIENCE_S)
        seen.result(0)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text; 0 before anybody answers."""
        try:
            url = (self.state / metrics_endpoint.METRICS_FILE).read_text()
            with urllib.request.urlopen(url + path, timeout=10) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def until(self, wanted: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not wanted():
            assert time.monotonic() < until, f"{what}: {self.get('/readyz')}"
            time.sleep(0.05)

    def samples(self) -> dict[tuple[str, str], float]:
        """Values by name and part, or phase, of this site."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        return {
            (sample.name, sample.labels.get("part") or sample.labels.get("phase") or ""): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("site") == "ann"
        }

    def told(self, event: str) -> list[Any]:
        """Facts of the audit log's lines of an event."""
        return [record.facts for record in journal.records(self.state / FILE) if record.event == event]


def released(watcher: Watcher) -> dict[str, float]:
    """By part, as the audit log says it."""
    found: Counter[str] = Counter()
    announced = {
        sent["facts"]["digest"]: sent["facts"]["parts"]
        for sent in watcher.told("sent")
        if sent["call"] == "BeginUpload"
    }
    for parts in announced.values():
        found.update({part: size for part, _, size in parts})
    return {part: float(size) for part, size in found.items()}


def counted(samples: dict[tuple[str, str], float], name: str) -> dict[str, float]:
    return {part: value for (found, part), value in samples.items() if found == f"protofed_client_{name}" and value}


@pytest.fixture
def server_at(
    unused_port: int, live_server: Callable[..., LiveServer], recipe_of: Callable[..., Recipe]
) -> tuple[str, Callable[[], LiveServer]]:
    """An address, and how to let a server answer there."""
    address = f"127.0.0.1:{unused_port}"
    return address, lambda: live_server(recipe_of("fednh", **ONE_SITE), listen=address)


def test_a_daemon_is_ready_while_its_server_answers_and_counts_what_its_audit_log_says(
    tmp_path: Path, server_at: tuple[str, Callable[[], LiveServer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, start = server_at
    watcher = Watcher(tmp_path, address, RULES)
    dumps: list[tuple[int, int]] = []
    monkeypatch.setattr(
        resource, "setrlimit", lambda what, to: dumps.append(to) if what == resource.RLIMIT_CORE else None
    )

    def look() -> None:
        watcher.until(lambda: watcher.get("/readyz")[0] == 503, "it looks for its server")
        assert dumps == [(0, 0)]
        assert watcher.get("/readyz")[1].startswith(f"enrolled: {address} has not done what this daemon asked for")
        assert watcher.get("/healthz")[0] == 200
        assert counted(watcher.samples(), "registered") == {}
        server = start()
        watcher.until(lambda: watcher.get("/readyz") == (200, "ready\n"), "it takes part")
        watcher.until(lambda: server.runs.finished, "the run ends")
        watcher.until(lambda: counted(watcher.samples(), "phase") == {"idle": 1.0}, "it has nothing to do")
        presence, samples = server.runs._context.presence, watcher.samples()
        assert counted(samples, "registered") == {"": 1.0}
        watcher.until(
            lambda: (told := presence.progress("ann")) is not None and told.activity is Activity.IDLE, "so told"
        )
        assert counted(samples, "bytes_released_total") == released(watcher)
        assert released(watcher).keys() == {"body", "head", "prototypes"}
        assert counted(samples, "policy_refusals_total") == {}
        assert counted(samples, "samples_total")[""] % 2 == 0  # two rounds of an epoch
        assert counted(samples, "step_seconds_count")[""] > 0
        assert counted(samples, "step_seconds_sum")[""] > 0
        assert counted(samples, "disk_free_bytes")
        assert presence.telemetry("ann") == {}  # its policy names none of it
        assert not [sent for sent in watcher.told("sent") if "telemetry" in sent["facts"]]
        server.stop()
        watcher.until(lambda: watcher.get("/readyz")[0] == 503, "its server has gone")
        assert counted(watcher.samples(), "registered") == {}

    watcher.watch(look)
    assert not (watcher.state / metrics_endpoint.METRICS_FILE).exists()  # nobody answers there any more


def test_what_the_policy_lets_pass_is_re_exported_and_nothing_of_counts(
    tmp_path: Path, server_at: tuple[str, Callable[[], LiveServer]]
) -> None:
    address, start = server_at
    watcher = Watcher(tmp_path, address, (shipped.folder("policies") / "open.toml").read_text())

    def look() -> None:
        server = start()
        watcher.until(lambda: server.runs.finished, "the run ends")
        presence = server.runs._context.presence
        everything = {name.value for name in Telemetry} - {"gpu_memory_bytes"}
        local = watcher.samples()
        total = sum(counted(local, "bytes_released_total").values())
        watcher.until(lambda: presence.telemetry("ann").get("bytes_released") == total > 0, "telemetry arrives")
        assert presence.telemetry("ann").keys() == everything
        trained = counted(local, "samples_total")[""]
        assert trained not in presence.telemetry("ann").values()
        named = [sent["facts"]["telemetry"] for sent in watcher.told("sent") if "telemetry" in sent["facts"]]
        assert everything >= {name for names in named for name in names} >= {"disk_free_bytes", "step_seconds"}

    watcher.watch(look)


def test_a_part_that_the_policy_refuses_is_counted_and_in_the_audit_log(
    tmp_path: Path, server_at: tuple[str, Callable[[], LiveServer]]
) -> None:
    address, start = server_at
    watcher = Watcher(tmp_path, address, RULES.replace(', "prototypes"', ""))

    def look() -> None:
        start()
        watcher.until(lambda: counted(watcher.samples(), "policy_refusals_total") != {}, "something is refused")
        watcher.until(lambda: watcher.get("/readyz")[0] == 200, "it could take part in another run")
        refusals = counted(watcher.samples(), "policy_refusals_total")
        assert refusals.keys() == {"prototypes"}
        assert abs(refusals["prototypes"] - len(watcher.told("refused"))) <= 1  # another may be under way
        assert counted(watcher.samples(), "bytes_released_total") == {}

    watcher.watch(look)


def test_a_policy_by_name_is_in_the_audit_log_with_its_digest(
    tmp_path: Path, server_at: tuple[str, Callable[[], LiveServer]]
) -> None:
    watcher = Watcher(tmp_path, server_at[0], RULES)
    watcher.settings = watcher.settings.model_copy(update={"policy": "standard"})

    def look() -> None:
        watcher.until(
            lambda: (watcher.state / FILE).is_file() and watcher.told("policy") != [], "the policy is recorded"
        )
        version = digest((shipped.folder("policies") / "standard.toml").read_bytes())
        assert watcher.told("policy") == [{"policy": "standard", "digest": version}]

    watcher.watch(look)


def test_the_option_changes_the_address_and_keeps_the_rest_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        'site = "ann"\npolicy = "p.toml"\nstate = "s"\ndata = { source = "digits" }\n'
        '[metrics]\nlisten = "127.0.0.1:1"\ntoken = "token"\n'
    )
    assert read_settings(ClientSettings, file, {"metrics": None}).metrics == Monitoring(
        listen="127.0.0.1:1", token=tmp_path / "token"
    )
    assert read_settings(ClientSettings, file, {"metrics": {"listen": "127.0.0.1:2"}}).metrics == Monitoring(
        listen="127.0.0.1:2", token=tmp_path / "token"
    )
    file.write_text(file.read_text() + "port = 3\n")
    with pytest.raises(ConfigError, match=r"'metrics\.port'"):
        read_settings(ClientSettings, file, {})


def test_a_state_folder_of_another_site_is_refused_and_its_audit_log_stays_as_it_is(
    unused_port: int, tmp_path: Path
) -> None:
    watcher = Watcher(tmp_path, f"127.0.0.1:{unused_port}", RULES)
    watcher.watch(lambda: watcher.until(lambda: watcher.get("/healthz")[0] == 200, "it starts"))
    before = (watcher.state / FILE).read_bytes()
    watcher.settings = watcher.settings.model_copy(update={"site": "ben"})
    with pytest.raises(ConfigError, match=rf"{watcher.state} belongs to site 'ann', and this is site 'ben'.* --state"):
        client.run_client(watcher.settings, until_finished=False, give_up_after_s=None)
    assert (watcher.state / FILE).read_bytes() == before


def test_an_address_that_cannot_be_had_ends_the_daemon_before_it_takes_part(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, "127.0.0.1:1", RULES)
    wrong = watcher.settings.model_copy(update={"metrics": Monitoring(listen="nonsense")})
    with pytest.raises(ConfigError, match="nonsense"):
        client.run_client(wrong, until_finished=True, give_up_after_s=1.0)


def test_data_in_the_common_folder_are_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"site": "ann", "policy": "p.toml", "state": "s", "data": {"source": "manifest", "root": "list.csv"}}
    settings = ClientSettings.model_validate(said)
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"list\.csv"):
        client.check_root(settings)
    (tmp_path / "list.csv").write_text("path,label\n", encoding="utf-8")
    client.check_root(settings)


class Answering:
    """An agent to which the server gives these answers, and then ends."""

    def __init__(self, clock: Clock, *answers: Task | Wait | Finished) -> None:
        self._clock, self._answers, self.asked = clock, iter(answers), list[float]()

    def step(self, wait_s: float, run_wait_s: float) -> Task | Wait | Finished:
        self.asked.append(self._clock.now)
        return next(self._answers, Finished("completed", last=True))


class Clock:
    """Seconds pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(client, "time", made)
    return made


FIT = Task(TaskKind.FIT, "run", 1, "n1", None, 0, 60.0)


@pytest.mark.parametrize("answer", [Wait(0.0), Finished("completed", last=False)], ids=["wait", "finished"])
def test_a_server_that_always_says_ask_again_now_is_asked_once_a_second(answer: Wait | Finished, clock: Clock) -> None:
    agent: Any = Answering(clock, *[answer] * 100)
    client._take_part(agent, until_finished=True)
    assert agent.asked[client.IDLE_STEPS] == 0.0  # a few times at once: at a restart that is right
    assert clock.now == len(agent.asked) - 1 - client.IDLE_STEPS


def test_tasks_are_taken_as_they_come_and_pauses_kept_within_a_minute(clock: Clock) -> None:
    answers: list[Task | Wait | Finished] = [FIT, Wait(0.0)] * 100
    agent: Any = Answering(clock, *answers)
    client._take_part(agent, until_finished=True)
    assert clock.now == 0.0
    agent = Answering(clock, Wait(7.0), Wait(1e6), FIT)
    client._take_part(agent, until_finished=True)
    assert agent.asked == [0.0, 7.0, 67.0, 67.0]


def test_classes_that_a_site_does_not_score_are_in_its_log(tmp_path: Path, recipe_of: Callable[..., Recipe]) -> None:
    labels = np.repeat(np.arange(3), [40, 12, 9])
    images = np.zeros((len(labels), 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels)
    data = {"source": "npz", "root": tmp_path / "a.npz", "test_fraction": 0.3, "local_test_fraction": 0.25}
    settings = ClientSettings.model_validate({"site": "a", "policy": "p", "state": "s", "data": data})
    recipe = recipe_of("fedavg")
    with capture_logs() as lines:
        client._load(settings, torch.device("cpu"), recipe)
    told = {line["where"]: (line["run"], line["missing"]) for line in lines}
    assert told == {"test set": (recipe.name, ["2"]), "own test set": (recipe.name, ["1", "2"])}


@pytest.mark.parametrize("roles", [{"evaluator"}, {"trainer", "evaluator"}])
def test_a_site_that_trains_and_evaluates_is_told_what_its_scores_tell(roles: set[str], tmp_path: Path) -> None:
    settings = ClientSettings.model_validate(
        {"site": "a", "policy": "standard", "state": tmp_path, "data": {"source": "digits"}, "roles": roles}
    )
    with capture_logs() as lines:
        client._warn_of_held_out_scores(settings, PolicyFile(shipped.policy("standard")))
    assert [line["log_level"] for line in lines] == ["warning"] * (len(roles) - 1)
    assert all("global.majority" in line["scores"] for line in lines)


def test_a_revoked_daemon_is_silent_until_its_certificate_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, asked, status = ["old", "old", "old", "new"], list[str](), DaemonStatus(run="run")
    identity: Any = SimpleNamespace(
        current=lambda: SimpleNamespace(
            certificate=SimpleNamespace(fingerprint=shown.pop(0) if len(shown) > 1 else shown[0])
        )
    )

    def take_part() -> None:
        asked.append(shown[0])
        if len(asked) == 1:
            raise RevokedError("lost")

    pauses: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda _: pauses.append(status.run))
    settings: Any = SimpleNamespace(when_revoked="wait")
    client._until_replaced(settings, identity, status, take_part)
    assert (asked, pauses) == (["old", "new"], ["", ""])  # no run, no heartbeat


@pytest.mark.parametrize(("when_revoked", "encrypted"), [("end", True), ("wait", False)])
def test_a_revoked_daemon_that_cannot_wait_ends(when_revoked: str, encrypted: bool) -> None:
    current = SimpleNamespace(certificate=SimpleNamespace(fingerprint="old"))
    identity: Any = SimpleNamespace(current=lambda: current) if encrypted else None

    def take_part() -> None:
        raise RevokedError("lost")

    settings: Any = SimpleNamespace(when_revoked=when_revoked)
    with pytest.raises(RevokedError):
        client._until_replaced(settings, identity, DaemonStatus(), take_part)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_is_stopped_says_so(number: signal.Signals) -> None:
    with capture_logs() as lines, signals.stoppable():
        os.kill(os.getpid(), number)
        time.sleep(PATIENCE_S)
    assert [(line["event"], line["reason"]) for line in lines] == [("stopped", number.name)]


def test_a_daemon_that_is_hung_up_ends_with_an_error_so_that_a_supervisor_restarts_it() -> None:
    def work() -> None:
        with signals.stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(PATIENCE_S)

    with pytest.raises(signals.HangUpError, match="SIGHUP") as ended:
        work()
    assert ended.value.exit_code == 129
