"""What a run record says of a run, by hand, from a ledger and blobs that a real coordinator wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.operator_lab import operator_lab

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, FailureReason
from protofed.common.payload import Part, Tensors
from protofed.common.protocol.messages import Activity, PauseReason, TaskKind, Verdict
from protofed.server.operator import run_record as run_record_module
from protofed.server.operator.run_record import MAX_CLASSES, cosines, run_record, similarity
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.rows import CertificateRow, RoundRow
from protofed.server.verdicts import EXCLUDED, REVOKED, RefusalCode, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

SITES = ("ann", "bob", "cyd")
OF_0_2_0 = (Path(__file__).parents[2] / "golden" / "v0_3_0" / "server" / "ledger.sql").read_text(encoding="utf-8")


def seen(lab: Lab) -> dict[str, Any]:
    found = run_record(lab.ledger, lab.blobs, "test")
    assert found == json.loads(json.dumps(found, allow_nan=False))
    return found


def told(lab: Lab, site: str, **scores: float) -> None:
    """The site's scores of the newest model."""
    task = lab.task(site)
    assert task.kind is TaskKind.SCORE
    named = {name.replace("__", "."): value for name, value in scores.items()}
    lab.intake.report_scores(site, f"daemon-{site}", task.task_id, named)


def tasks(found: dict[str, Any], place: int = -1) -> dict[tuple[str, str], dict[str, Any]]:
    return {(task["site"], task["kind"]): task for task in found["rounds"][place]["tasks"]}


def test_a_run_without_sites_has_empty_parts_and_one_that_is_not_known_is_an_error(make: MakeLab) -> None:
    lab = make()
    with pytest.raises(ConfigError, match="no run 'other'"):
        run_record(lab.ledger, lab.blobs, "other")
    found = seen(lab)
    assert (found["run"]["name"], found["run"]["status"], found["run"]["ended_at"]) == ("test", "going on", None)
    assert (found["rounds"], found["scores"], found["sites"]) == ([], [], {})
    assert found["prototypes"] == {"round": None, "cosines": []}
    assert found["norms"] == {"round": None, "part": "", "sites": {}}
    assert found["classes"]["newest"] == found["classes"]["best"] == {"round": None, "sites": {}}
    assert found["recipe"]["method"] == {"name": "fedavg"}


def test_a_round_has_its_sites_bytes_losses_and_norms(lab: Lab) -> None:
    sizes = {}
    for site, value in zip(SITES, (1.0, 2.0, 4.0), strict=True):
        sizes[site] = len(lab.announce(lab.model(value))[1])
        lab.push(site, lab.model(value), metrics={"loss": value / 4})
    found = seen(lab)
    first, second = found["rounds"]
    ended = [(one["round"], one["attempt"], one["outcome"]) for one in (first, second)]
    assert ended == [(0, 1, "published"), (1, 1, "published")]
    assert (second["size"], second["quorum"], second["state"]) == (3, 2, lab.address)
    ann = tasks(found)["ann", "fit"]
    assert (ann["task_status"], ann["received"], ann["loss"], ann["refused"]) == ("reported", sizes["ann"], 0.25, [])
    assert ann["norm"] == pytest.approx(math.sqrt(4 + 6))  # 2 x 2 of the body, 3 x 2 of the head, each 1 away
    moved = [task_status for one in found["rounds"] for task_status in one["tasks"]]
    assert (sum(f["received"] for f in moved), sum(f["sent"] for f in moved)) == lab.ledger.moved("test")
    expected = {site: [round(v * math.sqrt(2), 4)] * 3 for site, v in zip(SITES, (1.0, 2.0, 4.0), strict=True)}
    assert found["norms"] == {"round": 1, "part": "head", "sites": expected}
    assert found["prototypes"] == {"round": 1, "cosines": []}
    assert set(found["sites"]) == {"ann", "bob", "cyd", "eva"}


def test_what_was_refused_failed_or_late_says_why(lab: Lab) -> None:
    manifest, _ = lab.announce(lab.model(1.0))
    lab.intake.refuse(
        "bob", lab.task("bob").task_id, manifest, UpdateProblem(RefusalCode.NOT_FINITE, "body/w holds <NaN>")
    )
    lab.beat("cyd", lab.task("cyd").task_id, activity=Activity.FAILED, failure=FailureReason.OUT_OF_MEMORY)
    lab.push("ann", lab.model(1.0))
    lab.push("bob", lab.model(1.0))
    lab.later(51.0, alive=("ann", "bob"))
    found = seen(lab)
    assert found["rounds"][-1]["outcome"] == "degraded"
    (refused,) = tasks(found)["bob", "fit"]["refused"]
    assert refused == {
        "verdict": "refused",
        "code": RefusalCode.NOT_FINITE,
        "reason": "body/w holds <NaN>",
        "bytes": manifest.total_bytes,
        "digest": manifest.digest,
    }
    assert tasks(found)["cyd", "fit"]["task_status"] == "failed"


def test_an_abandoned_attempt_stays_beside_the_one_that_counts(lab: Lab) -> None:
    lab.push("ann", lab.model(1.0))
    lab.later(100.0, alive=SITES)
    lab.later(0.0)
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    attempts = [(one["round"], one["attempt"], one["outcome"], one["reason"]) for one in seen(lab)["rounds"]]
    assert attempts[1:3] == [(1, 1, "abandoned", "1 update at the deadline, quorum 2"), (1, 2, "published", "")]


def test_a_run_that_ended_before_its_first_round_says_so(make: MakeLab) -> None:
    lab = make()
    lab.gather()
    lab.run.stop("the wrong model")
    found = seen(lab)
    assert (found["run"]["status"], found["run"]["reason"]) == ("aborted", "the wrong model")
    assert [one["round"] for one in found["rounds"]] == [0]
    assert found["scores"] == []


def test_scores_of_single_classes_are_told_of_the_newest_and_the_best_round_only(make: MakeLab) -> None:
    lab = make(rounds=3).begin()
    for right in (0.5, 0.9, 0.7):
        lab.train(1.0)
        told(lab, "ann", personal__pm_v=right / 2, personal__recall__0=right / 4)
        for site in ("bob", "cyd"):
            told(lab, site, personal__pm_v=right)
        told(lab, "eva", global__accuracy=right, global__recall__1=right)
    found = seen(lab)
    assert [one["round"] for one in found["scores"]] == [1, 2, 3]
    assert found["scores"][1]["sites"]["ann"] == {"personal.pm_v": 0.45}
    assert found["scores"][2]["sites"]["eva"] == {"global.accuracy": 0.7}
    assert found["classes"]["judged_by"] == "global.accuracy"
    assert found["classes"]["newest"] == {
        "round": 3,
        "sites": {"ann": {"personal.recall.0": 0.175}, "eva": {"global.recall.1": 0.7}},
    }
    assert found["classes"]["best"]["round"] == 2
    assert found["classes"]["best"]["sites"]["eva"] == {"global.recall.1": 0.9}


def test_the_best_round_has_its_score_its_value_and_the_round_whose_state_is_kept(make: MakeLab) -> None:
    lab = make(rounds=4, keep_rounds=1).begin()
    assert seen(lab)["best"] is None
    for right in (0.5, 0.75, 0.25):
        lab.train(right)
        for site in ("eva", *SITES):
            told(lab, site, **({"global__accuracy": right} if site == "eva" else {}))
    best = {"round": 2, "score": "global.accuracy", "value": 0.75}
    assert seen(lab)["best"] == {**best, "kept": 2}
    assert seen(lab)["classes"]["judged_by"] == "global.accuracy"
    states = {row.round: row.state for row in lab.ledger.rounds("test")}
    lab.blobs.discard(states[2] or Digest(""))  # as of a run of 0.2.0, which kept no best round
    assert seen(lab)["best"] == {**best, "kept": 1}


# What operators did


def test_interventions_name_who_when_and_why_with_the_round() -> None:
    lab = operator_lab()
    lab.start("one")
    lab.begin()
    lab.operation.exclude("cyd", "no ethics vote", by="olga")
    lab.operation.pause("one", paused=True, by="olga")
    lab.operation.abort("one", "the wrong labels")
    lab.operation.admit("cyd", by="olga")  # no run goes on: it is none of this run's
    found = run_record(lab.ledger, lab.blobs, "one")
    told = [(i["action"], i["operator"], i["site"], i["reason"], i["round"]) for i in found["interventions"]]
    assert told == [
        ("excluded", "olga", "cyd", "no ethics vote", 1),
        ("paused", "olga", None, "", 1),
        ("aborted", "", None, "the wrong labels", 1),
    ]
    never = {"excluded": "", "excluded_at": None, "revoked": "", "revoked_at": None}
    assert found["sites"]["ann"] == {"roles": ["trainer"], **never}


@pytest.mark.parametrize("action", ["excluded", "revoked"])
def test_an_exclusion_with_which_the_run_ends_is_one_of_that_run(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = operator_lab()
    lab.start("one", rounds=1)
    lab.begin()
    lab.train(1.0)
    for site in ("ann", "bob", "cyd"):
        lab.score(site)
    if action == "excluded":
        lab.operation.exclude("eva", "its scores never come")
    else:
        row = CertificateRow("f" * 64, "site", "eva", 0.0, 9e9, 0.0, 1.0, "", ("evaluator",))
        monkeypatch.setattr(lab.operation.certificates, "revoke", lambda *_: [row])
        lab.operation.revoke("eva", "its scores never come")
    assert lab.runs.current is None
    found = run_record(lab.ledger, lab.blobs, "one")
    assert [(i["action"], i["site"], i["round"]) for i in found["interventions"]] == [(action, "eva", 1)]


def test_a_task_says_what_ended_it_in_its_sites_place(make: MakeLab) -> None:
    lab = make(federation={"quorum": 1}).begin()
    for site, reason in (("ann", f"{EXCLUDED}no vote"), ("bob", f"{REVOKED}stolen"), ("cyd", PauseReason.SCHEDULE)):
        lab.run.dismiss(site, reason)
    for reason in (PauseReason.APPROVAL, PauseReason.SCHEDULE, PauseReason.PAUSED, PauseReason.POLICY):
        assert run_record_module._cause(reason) == "paused"
    for left in (PauseReason.WITHDRAWN, FailureReason.WITHDRAWN):  # denied in its place, and declined by itself
        assert run_record_module._cause(left) == "withdrawn"
    assert run_record_module._cause(PauseReason.BUDGET) == "budget"
    assert {site: task["cause"] for (site, kind), task in tasks(seen(lab), 1).items() if kind == "fit"} == {
        "ann": "excluded",
        "bob": "revoked",
        "cyd": "paused",
    }


def state(blobs: MemoryBlobs, tensors: Tensors) -> Digest:
    return blobs.put(codec.encode({Part.PROTOTYPES: tensors}))


def row(number: int, address: Digest | None, **fields: Any) -> RoundRow:
    return RoundRow("test", number, 1, 3, 2, address, **fields)


def test_cosines_by_hand() -> None:
    found = cosines(np.array([[2.0, 0.0], [0.0, 0.5], [3.0, 3.0], [0.0, 0.0]], np.float32))
    half = math.sqrt(0.5)
    expected = np.array([[1, 0, half], [0, 1, half], [half, half, 1]])
    assert found[:3, :3] == pytest.approx(expected)
    assert np.isnan(found[3]).all()
    assert np.isnan(found[:, 3]).all()


def test_the_similarity_is_that_of_the_newest_state_that_is_kept_and_counts_and_of_few_classes() -> None:
    blobs = MemoryBlobs()
    old = state(blobs, {"mean": np.eye(2, dtype=np.float32)})
    new = state(blobs, {"mean": np.array([[1, 0], [-1, 0]], np.float32)})
    gone = codec.digest(b"pruned")
    rows = [row(1, old), row(2, new, rolled_back=True), row(2, gone), row(3, None)]
    assert similarity(rows, blobs, 2) == {"round": 1, "cosines": [[1.0, 0.0], [0.0, 1.0]]}
    assert similarity([*rows, row(4, new)], blobs, 2) == {"round": 4, "cosines": [[1.0, -1.0], [-1.0, 1.0]]}
    assert similarity([row(2, gone)], blobs, 2) == {"round": None, "cosines": []}
    rows = [row(1, state(blobs, {"0": np.array([3, 4], np.float32), "2": np.array([4, 3], np.float32)}))]
    assert similarity(rows, blobs, 3)["cosines"] == [[1.0, None, 0.96], [None, None, None], [0.96, None, 1.0]]
    rows = [row(1, state(blobs, {"mean": np.ones((MAX_CLASSES + 1, 2), np.float32)}))]
    assert similarity(rows, blobs, MAX_CLASSES + 1)["cosines"] == []


def test_norms_are_those_of_prototypes_where_no_head_was_sent(make: MakeLab) -> None:
    lab = make(method={"name": "fedprp"}, classes=3).begin()
    for site, rows in (("ann", {"0": [3, 4]}), ("bob", {"1": [0, 2], "0": [1, 0]}), ("cyd", {"2": [6, 8]})):
        prototypes = {name: np.array(values, np.float32) for name, values in rows.items()}
        body = lab.model(1.0)[Part.BODY]
        assert lab.push(site, {Part.BODY: body, Part.PROTOTYPES: prototypes}).verdict is Verdict.ACCEPTED
    found = seen(lab)
    assert found["norms"]["part"] == "prototypes"
    assert found["norms"]["sites"] == {"ann": [5.0, None, None], "bob": [1.0, 2.0, None], "cyd": [None, None, 10.0]}


ONE_CLASS = {
    "global__balanced_accuracy": 1 / 3,
    "global__recall__0": 0.0,
    "global__recall__1": 1.0,
    "global__recall__2": 0.0,
}


def test_updates_that_are_not_finite_are_a_warning_while_the_run_goes_on(make: MakeLab) -> None:
    lab = make(federation={"quorum": 3}).begin()
    manifest, _ = lab.announce(lab.model(1.0))
    problem = UpdateProblem(RefusalCode.NOT_FINITE, "body/w holds NaN")
    lab.intake.refuse("bob", lab.task("bob").task_id, manifest, problem)
    assert seen(lab)["warnings"] == []  # it may send another one
    lab.beat("cyd", lab.task("cyd").task_id, activity=Activity.FAILED, failure=FailureReason.NUMERIC)
    (warning,) = seen(lab)["warnings"]
    assert (warning["code"], warning["round"]) == ("diverging", 1)
    assert (warning["unusable"], warning["invited"]) == (2, 3)
    lab.later(60.0, alive=SITES)
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    assert seen(lab)["warnings"] == []


def test_warnings_of_a_long_run_are_read_from_its_first_and_last_rounds(make: MakeLab) -> None:
    lab = make(rounds=9).begin()
    for number in range(1, 10):
        lab.train(float(number))
        right = 0.9 if number == 3 else 0.4
        better = {"global__balanced_accuracy": right, "global__recall__0": right}
        told(lab, "eva", **(ONE_CLASS if number == 9 else better))
        for site in SITES:
            told(lab, site, personal__accuracy=number / 10)
    found = {warning["code"]: warning for warning in seen(lab)["warnings"]}
    assert set(found) == {"one-class", "diverging"}
    assert (found["diverging"]["best"], found["diverging"]["best_round"]) == (0.9, 3)
