"""What is read when somebody asks: the ledger's own numbers, and no scrape fails for what cannot be read."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from tests.server.conftest import EVALUATOR, TRAINERS, daemon, model, recipe
from tests.support.operator_lab import OperatorLab

from protofed.common.errors import ProtocolError, StateError
from protofed.common.protocol.messages import Activity, PauseReason, Progress, Role, Verdict
from protofed.server.access.certificates import Certificates
from protofed.server.monitoring import collector
from protofed.server.monitoring.collector import SITE_STATES, TASK_STATUSES, CollectorSources, StateCollector
from protofed.server.operator.run_record import overview, run_record
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.waiting import WaitReason
from protofed.server.rounds.scores.model_warnings import ModelWarning, WarningCode
from protofed.server.rounds.scores.scoring import find_warnings
from protofed.server.storage.blobs import BLOBS, MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import CertificateRow


class Scraped:
    """An operator's lab whose ledger is a file, and what a scrape of it says."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder / 'ledger.sqlite'}"
        self.lab = OperatorLab(recipe(), MemoryBlobs(), Ledger(self.url))
        self.records = LedgerReader(self.url)
        self.certificates = Certificates(self.lab.ledger)
        self.lag: float | None = None
        self.collector = self._collector()
        if tables.pop("sites", True):
            self.lab.enroll(EVALUATOR, role=Role.EVALUATOR)
            self.lab.enroll(*TRAINERS)
        self.lab.start("one", **tables)

    def restart(self) -> None:
        self.lab.restart()
        self.collector = self._collector()

    def _collector(self) -> StateCollector:
        lab = self.lab
        return StateCollector(
            CollectorSources(
                lab.runs, lab.presence, self.records, self.certificates, None, self.folder, lambda: self.lag
            )
        )

    def first_model(self) -> None:
        self.lab.later(0)
        self.lab.first_models()

    def __call__(self, name: str, /, **labels: str) -> float | None:
        return next((value for found, value in self.series(name) if found == labels), None)

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values."""
        samples = [sample for family in list(self.collector.collect()) for sample in family.samples]
        return [(sample.labels, sample.value) for sample in samples if sample.name == f"protofed_{name}"]

    def phase(self, run: str = "one") -> list[str]:
        """The phases that are said to be now."""
        found = self.series("round_phase")
        return [labels["phase"] for labels, value in found if value == 1 and labels["run"] == run]

    def close(self) -> None:
        self.records.close()
        self.lab.ledger.close()


@pytest.fixture
def open_office(tmp_path: Path) -> Iterator[Callable[..., Scraped]]:
    opened: list[Scraped] = []

    def make(**tables: Any) -> Scraped:
        opened.append(Scraped(tmp_path, **tables))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def read(open_office: Callable[..., Scraped]) -> Scraped:
    found = open_office()
    found.first_model()
    return found


def states_of(read: Scraped, name: str) -> dict[str, float]:
    """How many are in each state, without the empty ones."""
    return {labels["state"]: value for labels, value in read.series(name) if value}


def age(read: Scraped, site: str) -> float:
    """Seconds since the site's last progress, as PromQL would have it."""
    at = read("site_last_progress_timestamp_seconds", site=site)
    assert at is not None
    return time.time() - at


# Runs and rounds


def test_the_round_that_is_open(read: Scraped) -> None:
    lab = read.lab
    lab.push("ann", model(1.0))
    lab.beat("bob", lab.task("bob").task_id)
    assert (read("round", run="one"), read("rounds_planned", run="one"), read.phase()) == (1, 2, ["collecting"])
    assert states_of(read, "round_sites") == {"invited": 1, "started": 1, "reported": 1}
    assert (read("round_quorum", run="one"), read("round_deadline_seconds", run="one")) == (2, 100)
    assert read("round_opened_timestamp_seconds", run="one") == lab.ledger.rounds("one")[-1].opened_at
    assert read("checkpoint_timestamp_seconds") == lab.ledger.rounds("one")[0].closed_at is not None
    assert [read(f"prototype_{name}") for name in ("min_distance", "shift", "classes_covered")] == [None] * 3


def test_a_restart_begins_the_deadline_of_the_open_round_again(read: Scraped) -> None:
    """As the phase counts it, or RoundStuck and QuorumAtRisk would fire of a round that has all its time."""
    opened_at, before = read.lab.ledger.rounds("one")[-1].opened_at, time.time()
    read.lab.clock.now += 90.0
    read.restart()
    began = read("round_opened_timestamp_seconds", run="one")
    assert began is not None
    assert opened_at < before <= began <= time.time()
    assert isinstance(phase := read.lab.run.phase, phases.Collecting)
    assert phase.opened == 90.0
    read.lab.push("ann", model(1.0))
    read.lab.push("bob", model(1.0))
    assert read("round_opened_timestamp_seconds", run="one") == began
    read.lab.later(101.0, alive=TRAINERS)
    read.lab.operation.roll_back("one", 0)
    read.lab.later(0.0, alive=TRAINERS)
    assert read("round_opened_timestamp_seconds", run="one") == read.lab.ledger.rounds("one")[-1].opened_at > began


def test_the_states_of_a_rounds_sites_sum_to_those_invited(read: Scraped) -> None:
    lab = read.lab
    lab.run.dismiss("bob", "excluded")
    lab.push("ann", model(1.0))
    assert states_of(read, "round_sites") == {"invited": 1, "reported": 1, "failed": 1}
    lab.run.roll_back(0)
    lab.later(0.0)
    for site in ("ann", "bob"):
        lab.push(site, model(1.0))
    lab.later(101.0)  # cyd does not answer
    assert states_of(read, "round_sites") == {"reported": 2, "late": 1}
    assert {labels["state"] for labels, _ in read.series("round_sites")} == set(TASK_STATUSES)


def test_a_run_that_has_ended_is_told_until_another_one_begins(read: Scraped) -> None:
    for _ in range(2):
        read.lab.round(ann=1.0, bob=2.0, cyd=3.0)
    assert read.lab.runs.current is None
    assert (read.phase(), read("round", run="one"), read("rounds_planned", run="one")) == (["finished"], 2, 2)
    assert read("round_opened_timestamp_seconds", run="one") is None
    for run in ("two", "three", "four"):
        read.lab.start(run)
    read.lab.operation.pause("three", paused=True)
    read.lab.operation.abort("four", "enough")
    statuses = ("queued", "running", "paused", "completed", "failed", "aborted")
    assert [read("runs", state=one) for one in statuses] == [0, 1, 1, 1, 0, 1]
    assert (read("round", run="one"), read("round", run="two"), read.phase("two")) == (None, 0, ["idle"])
    assert read("checkpoint_timestamp_seconds") is None  # it has no state yet
    read.lab.operation.abort("two", "enough")
    assert read("round_opened_timestamp_seconds", run="two") is None


def test_nothing_of_a_run_before_there_is_one(tmp_path: Path) -> None:
    with closing(Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as ledger:
        lab = OperatorLab(recipe(), MemoryBlobs(), ledger)
        watched = CollectorSources(lab.runs, lab.presence, ledger, Certificates(ledger), None, tmp_path, lambda: None)
        found = {family.name: len(family.samples) for family in StateCollector(watched).collect()}
    assert found["protofed_runs"] == 6
    assert not found.keys() & {
        "protofed_round",
        "protofed_round_phase",
        "protofed_score",
        "protofed_event_loop_lag_seconds",
    }


# State, prototypes, scores


def test_prototypes_of_the_newest_state_survive_a_restart(open_office: Callable[..., Scraped]) -> None:
    read = open_office(method={"name": "fednh"})
    read.first_model()
    assert read("prototype_min_distance") == pytest.approx(
        read.lab.ledger.rounds("one")[0].statistics["prototype_min_distance"]
    )
    assert (read("prototype_shift"), read("prototype_classes_covered")) == (None, 0)
    read.restart()
    assert read("prototype_min_distance") == pytest.approx(1.5)  # three classes in a plane, 120 degrees apart


def test_what_speaks_against_a_model_is_counted_and_every_code_has_a_series(
    open_office: Callable[..., Scraped],
) -> None:
    read = open_office(rounds=1)
    read.first_model()
    lab = read.lab
    assert {value for _, value in read.series("model_warnings")} == {0}
    for site in TRAINERS:
        lab.push(site, model(1.0))
    recalls = {"global.recall.0": 0.0, "global.recall.1": 1.0, "global.recall.2": 0.0}
    lab.intake.report_scores(EVALUATOR, daemon(EVALUATOR), lab.task(EVALUATOR).task_id, recalls)
    for site in ("ann", "bob"):
        own = {"personal.local.recall.0": 1.0, "personal.local.recall.2": 0.0}
        lab.intake.report_scores(site, daemon(site), lab.task(site).task_id, own)
    lab.later(101.0)  # cyd does not answer: the run ends
    found = {tuple(labels.values()): value for labels, value in read.series("model_warnings")}
    assert len(found) == 2 * len(WarningCode)
    wrong = {key: value for key, value in found.items() if value}
    assert wrong == {("one", "global", "one-class"): 1, ("one", "personal", "one-class"): 2}


def test_a_scrape_costs_the_same_however_many_rounds_there_were(
    open_office: Callable[..., Scraped], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once read all rounds again at each scrape: 0.45 s of a core at 5,000."""
    read = open_office(rounds=1)
    read.first_model()
    readings: list[str] = []

    def counted(records: LedgerReader, run: str) -> list[ModelWarning]:
        readings.append(run)
        return find_warnings(records, run)

    monkeypatch.setattr(collector, "find_warnings", counted)
    for _ in range(2):
        assert len(read.series("model_warnings")) == 2 * len(WarningCode)
    assert readings == []
    read.lab.run.stop("enough")
    read.lab.later(1.0)
    assert read.lab.runs.current is None
    for _ in range(2):
        assert len(read.series("model_warnings")) == 2 * len(WarningCode)
    assert readings == ["one"]  # of a run that is over, once


def test_scores_of_the_newest_scored_round_by_scope_metric_and_stat(open_office: Callable[..., Scraped]) -> None:
    read = open_office(evaluation={"frequency_groups": True, "probabilities": True})
    read.first_model()
    lab = read.lab
    for site in TRAINERS:
        lab.push(site, model(1.0))
    told = {
        EVALUATOR: {"global.accuracy": 0.75, "global.recall.2": 0.5, "global.many": 0.25},
        "ann": {"personal.accuracy": 0.5, "personal.ece": 0.25, "personal.local.accuracy": 0.5, "personal.recall.0": 1},
        "bob": {"personal.accuracy": 1.0, "personal.ece": 0.75},
    }
    for site, scores in told.items():
        lab.intake.report_scores(site, daemon(site), lab.task(site).task_id, scores)
    lab.later(101.0)  # cyd does not answer
    found = {tuple(labels.values()): value for labels, value in read.series("score")}
    assert {key: value for key, value in found.items() if key[2] == "mean"} == {
        ("global", "accuracy", "mean"): 0.75,
        ("global", "many", "mean"): 0.25,
        ("personal", "accuracy", "mean"): 0.75,
        ("personal", "ece", "mean"): 0.5,
        ("personal", "local.accuracy", "mean"): 0.5,
    }
    assert (found["personal", "accuracy", "std"], found["personal", "accuracy", "worst"]) == (0.25, 0.5)
    assert found["personal", "ece", "worst"] == 0.75


def test_a_trainers_forged_score_reaches_no_metric_no_record_and_no_table(read: Scraped) -> None:
    lab = read.lab
    fit = lab.task("ann")
    assert lab.push("ann", model(1.0), fit, metrics={"global.accuracy": 1e308}).verdict is Verdict.REFUSED
    for site in TRAINERS:
        lab.push(site, model(1.0))
    forged = {"personal.accuracy": 0.5, "global.accuracy": 1e308}
    with pytest.raises(ProtocolError):
        lab.intake.report_scores("ann", daemon("ann"), lab.task("ann").task_id, forged)
    for site in ("bob", "cyd", EVALUATOR):
        lab.score(site)
    shown = overview(read.records, "one")
    assert shown is not None
    assert {name: (value.worst, value.sites) for name, value in shown.scores.items()} == {
        "global.accuracy": (0.5, 1),
        "personal.accuracy": (0.5, 2),
    }
    assert all(value in (0.0, 0.5) for _, value in read.series("score"))
    told = json.dumps(run_record(read.records, lab.blobs, "one"))
    assert "e+308" not in told
    assert lab.ledger.scores("one")[1].keys() == {"bob", "cyd", EVALUATOR}
    assert lab.metrics.registry.get_sample_value("protofed_scores_refused_total") == 1


# Sites


def test_sites_and_what_they_do(read: Scraped) -> None:
    lab = read.lab
    task_id = lab.task("ann").task_id
    progress = Progress(task_id, Activity.TRAINING, epoch=2, epochs=4)
    lab.runs.heartbeat("one", "ann", daemon("ann"), progress)
    assert states_of(read, "sites") == {"working": 1, "idle": 3}
    assert (read("site_epoch", site="ann"), read("site_progress_ratio", site="ann")) == (2, 0.25)
    assert [read("site_phase", site="ann", phase=phase) for phase in ("training", "idle")] == [1, 0]
    assert read("site_phase", site="bob", phase="idle") == 1
    assert len(read.series("site_phase")) == 4 * len(Activity)
    lab.runs.heartbeat("one", "bob", daemon("bob"), replace(progress, activity=Activity.UPLOADING, epoch=4))
    assert read("site_progress_ratio", site="bob") == 1.0  # an upload comes after the training
    lab.clock.now += 60.0
    assert age(read, "ann") == pytest.approx(60, abs=2.0)
    assert states_of(read, "sites") == {"silent": 4}


def test_of_many_sites_only_those_at_work_have_series_of_what_they_do(
    read: Scraped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "MANY_SITES", 3)
    lab = read.lab
    for site, activity in (("ann", Activity.TRAINING), ("bob", Activity.IDLE)):
        lab.runs.heartbeat("one", site, daemon(site), Progress(lab.task("ann").task_id, activity))
    assert {labels["site"] for labels, _ in read.series("site_phase")} == {"ann"}
    assert {labels["site"] for labels, _ in read.series("site_epoch")} == {"ann"}
    assert len(read.series("site_last_progress_timestamp_seconds")) == 4, "each may fall silent"
    assert states_of(read, "sites") == {"working": 1, "idle": 3}


def test_every_known_site_is_in_one_state_that_of_sites_list(read: Scraped) -> None:
    lab = read.lab
    lab.enroll("dan", "eli", role=Role.TRAINER)
    progress = Progress(lab.task("ann").task_id, Activity.SCORING)
    lab.runs.heartbeat("one", "ann", daemon("ann"), progress)
    lab.presence.enroll("cyd", {Role.TRAINER}, daemon("cyd"), PauseReason.SCHEDULE)
    lab.presence.forget("dan")
    lab.operation.exclude("eli", "broken scanner")
    lab.presence.exclude("zoe", "has never come")
    listed = Counter(report.status for report in lab.operation.sites())
    assert states_of(read, "sites") == listed == {"excluded": 2, "away": 1, "held": 1, "working": 1, "idle": 2}
    assert {labels["state"] for labels, _ in read.series("sites")} == set(SITE_STATES)
    assert (read("site_registered", site="eli"), read("site_last_progress_timestamp_seconds", site="eli")) == (0, None)


def test_after_a_restart_known_sites_are_waited_for_and_not_registered(read: Scraped) -> None:
    assert read("site_registered", site="ann") == 1
    read.lab.here.pop("ann")
    read.restart()
    read.lab.clock.now += 7.0
    assert read("site_registered", site="ann") == 0
    assert age(read, "ann") == pytest.approx(7, abs=2.0)
    assert read("site_phase", site="ann", phase="idle") is None
    assert read("site_registered", site="bob") == 1


def test_the_disk_the_loop_and_telemetry_are_told_as_far_as_they_came(read: Scraped) -> None:
    lab = read.lab
    numbers = {"gpu_memory_bytes": 5e9, "policy_refusals": 3.0}
    progress = Progress(lab.task("ann").task_id, Activity.TRAINING, telemetry=numbers)
    lab.runs.heartbeat("one", "ann", daemon("ann"), progress)
    assert read("site_gpu_memory_bytes", site="ann") == 5e9
    assert read("site_policy_refusals_total", site="ann") == 3
    assert read("site_step_seconds", site="ann") is None
    assert read("site_gpu_memory_bytes", site="bob") is None
    free = read("state_disk_free_bytes")
    assert free is not None
    assert free > 0
    read.lag = 0.25
    assert read("event_loop_lag_seconds") == 0.25


# Certificates, disk, loop


def test_the_last_certificate_of_each_name_counts_and_revoked_ones_do_not(read: Scraped) -> None:
    now = time.time()

    def known(number: int, party: str, name: str, ends: float, **more: Any) -> None:
        read.lab.ledger.register(CertificateRow(f"{number:064x}", party, name, 0.0, now + ends, now, **more))

    known(1, "site", "ann", 100.0)
    known(2, "site", "ann", 5000.0)
    known(3, "site", "bob", -50.0)
    known(4, "operator", "boss", 700.0)
    known(5, "site", "cyd", 900.0, revoked_at=now, reason="lost")
    read.certificates = Certificates(read.lab.ledger)
    read.collector = read._collector()
    found = {tuple(labels.values()): value for labels, value in read.series("cert_expiry_timestamp_seconds")}
    assert found == {("site", "ann"): now + 5000.0, ("site", "bob"): now - 50.0, ("operator", "boss"): now + 700.0}


def test_blobs_on_a_disk_of_their_own_count_where_it_has_less_room(
    read: Scraped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, state = tmp_path / "elsewhere", read.collector._sources.state
    elsewhere.mkdir()
    (state / BLOBS).symlink_to(elsewhere)
    rooms = {elsewhere: 5, state: 7}

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=rooms[folder.resolve()])

    monkeypatch.setattr("protofed.server.monitoring.collector.shutil.disk_usage", usage)
    assert read("state_disk_free_bytes") == 5
    rooms[elsewhere] = 9
    assert read("state_disk_free_bytes") == 7

    def gone(_path: Path) -> None:
        raise FileNotFoundError("no such folder")

    monkeypatch.setattr("protofed.server.monitoring.collector.shutil.disk_usage", gone)
    assert (read("state_disk_free_bytes"), read("runs", state="running")) == (None, 1)  # only its own metric


# What cannot be read


def test_a_ledger_that_cannot_be_read_is_left_out_and_logged_once(
    read: Scraped, monkeypatch: pytest.MonkeyPatch
) -> None:
    structlog.reset_defaults()

    def locked(*_: Any, **_values: Any) -> None:
        raise StateError("the database is locked")

    with capture_logs() as logs:
        with monkeypatch.context() as broken:
            broken.setattr(LedgerReader, "_read", locked)
            for _ in range(3):
                assert read("runs", state="running") is None
                assert read("round_phase", run="one", phase="collecting") == 1  # memory has it
                assert read("state_disk_free_bytes") is not None
        assert read("runs", state="running") == 1
        with monkeypatch.context() as broken:
            broken.setattr(LedgerReader, "_read", locked)
            assert read("runs", state="running") is None
    told = [entry for entry in logs if entry["event"].startswith("metrics are left out")]
    assert [(entry["of"], entry["why"]) for entry in told] == [
        ("ledger", "the database is locked"),
        ("known_sites", "the database is locked"),
    ] * 2


def test_scrapes_beside_the_coordinator_never_fail(read: Scraped) -> None:
    """Sites come and go on one thread while another one scrapes."""
    lab, failed = read.lab, []
    end = threading.Event()

    def scrape() -> None:
        with capture_logs() as logs:
            while not end.is_set():
                list(read.collector.collect())
        failed.extend(logs)

    thread = threading.Thread(target=scrape)
    thread.start()
    for number in range(300):
        site = f"guest-{number % 50}"
        lab.presence.enroll(site, {Role.TRAINER}, daemon(site)) if number % 3 else lab.presence.forget(site)
    end.set()
    thread.join(20)
    assert not thread.is_alive()
    assert not [entry for entry in failed if entry["event"].startswith("metrics are left out")]


def test_a_full_disk_costs_no_metric(mount: Callable[[Path, str], None], tmp_path: Path) -> None:
    folder = tmp_path / "small"
    mount(folder, "size=2m")
    read = Scraped(folder)
    read.first_model()
    with pytest.raises(OSError, match="No space left"):
        (folder / "filler").write_bytes(bytes(4 << 20))
    assert read("state_disk_free_bytes") == 0
    assert (read("runs", state="running"), read("round_sites", state="invited")) == (1, 3)
    assert read("site_registered", site="ann") == 1
    (folder / "filler").unlink()
    read.close()


def test_what_the_run_waits_for_is_one_of_all_reasons(read: Scraped) -> None:
    def reasons() -> set[str]:
        found = read.series("run_waiting")
        assert len(found) == len(WaitReason)
        assert {labels["run"] for labels, _ in found} == {"one"}
        return {labels["reason"] for labels, value in found if value}

    assert reasons() == {"updates"}
    read.lab.push("ann", read.lab.model(1.0))
    read.lab.operation.abort("one", "enough")
    assert reasons() == set()
