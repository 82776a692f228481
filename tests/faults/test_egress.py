"""Row 91: all that a site says in a run, recorded behind its TLS, is what is allowed and what its audit log tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.faults.conftest import take_turns
from tests.support.audit_logs import audit
from tests.support.pki import Authority
from tests.support.recorded_messages import SentMessage, Upload, handing_in, hiding, messages, of, uploads
from tests.support.tls_recorder import Recorder

from protofed.client.agent.agent import Agent
from protofed.client.agent.heartbeat import Heartbeat
from protofed.client.agent.metrics import ClientMetrics
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.models.catalogue import device_model
from protofed.client.policy.policy import Policy
from protofed.client.policy.update_checks import TELLS_STEPS
from protofed.client.site import DaemonStatus, Site
from protofed.client.state.store import MemoryStore
from protofed.client.transport.audit import FILE, ClientAudit
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import DataError
from protofed.common.payload import Array, Part, SiteId
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import Role, score_family
from protofed.common.storage import journal
from protofed.common.storage.journal import Journal
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import EVALUATOR, build_agents, load_data
from protofed.protos.v1 import federation_pb2 as pb
from protofed.testing.live_server import LiveServer

RECORDED, TRAINER = "site-1", frozenset({Role.TRAINER})
ROUNDS = 2
Load: TypeAlias = Callable[[Recipe], SiteData]
POLICY = shipped.folder("policies") / "open.toml"  # the widest that anybody has


@dataclass(frozen=True)
class Recording:
    """A run of three sites and an evaluator, of which one site was listened to.

    Attributes:
        data: what that site holds.
        connections: all that it said on each, in plain bytes.
        said: the same, understood.
        told: by the site's own audit log.
        heard: by the server's.
    """

    recipe: Recipe
    data: SiteData
    connections: list[bytes]
    said: list[SentMessage]
    told: list[journal.Record]
    heard: list[journal.Record]

    @property
    def uploads(self) -> list[Upload]:
        return uploads(self.said)

    @property
    def sent(self) -> list[Any]:
        """What the site's audit log tells of its calls."""
        return [record.facts for record in self.told if record.event == "sent"]


@pytest.fixture(scope="module", params=sorted(client_methods))
def recording(
    request: pytest.FixtureRequest,
    recipe_of: Callable[..., Recipe],
    tmp_path_factory: pytest.TempPathFactory,
    quick_heartbeats: None,
) -> Recording:
    """Of one method."""
    return record(recipe_of(str(request.param), rounds=ROUNDS), tmp_path_factory.mktemp("egress"))


def record(recipe: Recipe, folder: Path, load: Load | None = None) -> Recording:
    """Run it, and listen to one site, which begins: it makes the first model, unless its data cannot be loaded."""
    authority, data = Authority.make(), load_data(recipe)
    authority.issue(folder / "server", Party.SERVER, "server")
    authority.issue(folder / "recorder", Party.SERVER, "recorder")
    with ExitStack() as held:
        server = LiveServer(recipe, folder / "state", identity=folder / "server")
        held.callback(server.stop)
        for site in data:
            authority.issue(folder / site, Party.SITE, site)
            roles = [Role.EVALUATOR if site == EVALUATOR else Role.TRAINER]
            server.operation.certificates.register((folder / site / "cert.pem").read_bytes(), roles=roles)
        recorder = Recorder(server.address, folder / "recorder", folder / RECORDED)
        held.callback(recorder.close)

        def connect(
            site: SiteId, roles: frozenset[Role], to: str = server.address, log: ClientAudit | None = None
        ) -> GrpcLink:
            identity = LiveIdentity(folder / site, Party.SITE)
            link = GrpcLink(to, site, "tested", roles, identity=identity, audit=log or audit(), give_up_after_s=20)
            held.callback(link.close)
            return link

        lines = Journal(folder / FILE)
        held.callback(lines.close)
        agent = daemon(
            data.pop(RECORDED), connect(RECORDED, TRAINER, recorder.address, ClientAudit(lines)), recipe, held, load
        )
        take_turns([agent, *build_agents(recipe, connect, data=data)])
        held.close()
        told, heard = list(journal.records(folder / FILE)), list(journal.records(server.audit_file))
    said = messages(recorder.said)
    return Recording(recipe, load_data(recipe)[RECORDED], [bytes(one) for one in recorder.said], said, told, heard)


def policy_for(recipe: Recipe) -> Policy:
    """The widest shipped one; for a method that tells the number of examples, one that lets that out, too."""
    policy, name = Policy.read(POLICY), recipe.method.name
    if name in policy.rules.methods:
        return policy
    sends = client_methods.build(name, {}).sends
    assert sends & TELLS_STEPS, f"{name} is in no shipped policy: why?"
    rules = policy.rules
    wider = {"methods": rules.methods | {name}, "parts": rules.parts | sends, "example_count": True}
    return replace(policy, rules=rules.model_copy(update=wider))


def daemon(data: SiteData, link: GrpcLink, recipe: Recipe, held: ExitStack, load: Load | None) -> Agent:
    """The recorded site's, with its heartbeat."""
    policy, now = policy_for(recipe), DaemonStatus(heartbeat_s=0.05)
    metrics = ClientMetrics(RECORDED, now, state=Path())
    pulse = Heartbeat(link, now, lambda: link.bytes_moved, lambda: policy.release_telemetry(metrics.telemetry()))
    pulse.start()
    held.callback(pulse.join, 5.0)
    held.callback(pulse.stop)
    model = device_model(recipe, data.device, policy.rules.plugins)
    site = Site(RECORDED, TRAINER, policy, MemoryStore(), load or (lambda _: data), lambda _: model)
    return Agent(site, link, now)


def secrets(data: SiteData) -> dict[str, bytes]:
    """A site's images, labels and counts, as bytes that would tell of them."""
    train, counts = data.train, np.bincount(data.train.labels.numpy(), minlength=data.classes)
    normalised = train.normalised(data.input).numpy()
    found = {f"image {number}": image.tobytes() for number, image in enumerate(train.pixels().numpy())}
    found |= {f"normalised image {number}": image.tobytes() for number, image in enumerate(normalised)}
    for name, numbers in {"labels": train.labels.numpy()[:64], "counts": counts}.items():
        found |= {f"{name} as {kind}": packed for kind, packed in packings(numbers).items()}
    shares = counts / counts.sum()
    return found | {f"shares as {kind}": shares.astype(kind).tobytes() for kind in ("float32", "float64")}


def packings(numbers: Array) -> dict[str, bytes]:
    """Whole numbers in every way that somebody may think of."""
    kinds = ("uint8", "int16", "int32", "int64", "float32", "float64")
    message = pb.Upload(received_chunks=[int(number) for number in numbers])
    texts = {f"text with '{between}'": between.join(map(str, numbers)).encode() for between in (",", ", ", " ", ";")}
    packed = {kind: numbers.astype(kind).tobytes() for kind in kinds}
    return packed | texts | {"packed varints": message.SerializeToString()[2:]}


def test_row_91_only_known_messages_leave_and_all_of_their_bytes_are_understood(recording: Recording) -> None:
    calls = Counter(one.call for one in recording.said)
    assert calls["Enroll"] >= 1
    assert calls["BeginUpload"] == calls["CommitUpload"] == calls["PutChunk"] == 1 + ROUNDS
    assert calls["ReportScores"] == ROUNDS
    assert calls["Heartbeat"] >= 1
    messages: list[Any] = [one.message for one in recording.said]
    assert all(message.HasField("caller") for message in messages)
    assert {message.caller.site for message in messages} == {RECORDED}


def test_row_91_only_the_parts_leave_that_the_method_declares(recording: Recording) -> None:
    declared = client_methods.build(recording.recipe.method.name, {}).sends
    first, *fits = sorted(recording.uploads, key=lambda upload: upload.manifest.round)
    assert first.payload.keys() == {Part.BODY, Part.HEAD}  # the common model, before anybody trained it
    assert len(fits) == ROUNDS
    assert {part for upload in fits for part in upload.payload} == declared


def test_row_91_only_the_numbers_leave_that_the_policy_names(recording: Recording) -> None:
    rules = policy_for(recording.recipe).rules
    for upload in recording.uploads:
        assert upload.commit.HasField("weight") is (rules.example_count and upload.manifest.round > 0)
        assert set(upload.commit.metrics) <= {"loss"}
    reports = of(recording.said, pb.ScoresRequest)
    names = {name for report in reports for name in report.scores}
    assert names
    assert {score_family(name) for name in names} <= rules.metrics
    told = [fact["facts"].get("scores", {}) for fact in recording.sent if fact["call"] == "ReportScores"]
    assert sorted(told, key=str) == sorted((dict(report.scores) for report in reports), key=str), "in the audit log"


def test_row_91_of_the_machine_only_those_numbers_leave_that_the_policy_names(recording: Recording) -> None:
    beats = of(recording.said, pb.HeartbeatRequest)
    names = {name for beat in beats for name in beat.telemetry}
    assert {"disk_free_bytes", "policy_refusals"} <= names <= Policy.read(POLICY).rules.telemetry
    sent = recording.sent
    told = [fact["facts"].get("telemetry", {}) for fact in sent if fact["call"] == "Heartbeat"]
    values = Counter(tuple(sorted(beat.telemetry.items())) for beat in beats)
    assert Counter(tuple(sorted(one.items())) for one in told) == values, "names and values"
    seen = float(len(recording.data.train))
    assert not [beat for beat in beats if seen in beat.telemetry.values() or ROUNDS * seen in beat.telemetry.values()]


def test_row_91_each_task_that_the_server_gave_is_in_the_audit_log(recording: Recording) -> None:
    tasks: list[Any] = [record.facts for record in recording.told if record.event == "task"]
    announced = of(recording.said, pb.UploadManifest)
    given = {(task["run"], task.get("round", 0), task["task_id"], task.get("base_digest", "")) for task in tasks}
    assert {(one.run, one.round, one.task_id, one.base_digest) for one in announced} <= given
    assert {task["kind"] for task in tasks} >= {"initialise", "fit"}


def test_row_91_the_audit_log_tells_of_every_message(recording: Recording) -> None:
    sent = recording.sent
    others = [one for one in recording.said if one.call not in ("PutChunk", "GetChunk")]
    told = Counter((fact["call"], fact["bytes"], fact["digest"]) for fact in sent if "calls" not in fact)
    assert told == Counter((one.call, len(one.data), str(codec.digest(one.data))) for one in others)
    assert transfers(sent) == moved(recording)
    assert sum(fact["calls"] for fact in sent if "calls" in fact) == len(recording.said) - len(others)
    assert sum(fact["bytes"] for fact in sent) == sum(len(one.data) for one in recording.said) > 0


def test_row_91_the_server_has_written_down_the_same(recording: Recording) -> None:
    calls: list[Any] = [record.facts for record in recording.heard if record.event == "call"]
    own = [call for call in calls if call["peer"]["name"] == RECORDED]
    heard = Counter((call["call"], call["bytes"], call["digest"]) for call in own if "calls" not in call)
    others = [one for one in recording.said if one.call not in ("PutChunk", "GetChunk")]
    said = Counter((one.call, len(one.data), str(codec.digest(one.data))) for one in others)
    assert heard <= said
    counted, idle = Counter[str](), Counter[str]()  # the calls of a site that has nothing to do are only counted
    for record in recording.heard:
        facts: Any = record.facts
        if record.event == "counted" and facts["peer"]["name"] == RECORDED:
            counted.update({name.removesuffix(" OK"): number for name, number in facts["calls"].items()})
    for (call, _, _), number in (said - heard).items():
        idle[call] += number
    assert counted == idle
    assert counted.keys() <= {"Heartbeat", "NextTask", "Enroll"}
    assert transfers(own) == moved(recording)
    assert sum(call["calls"] for call in own if "calls" in call) == len(recording.said) - len(others)


def transfers(lines: Iterable[Any]) -> Counter[tuple[str, str]]:
    """By call and the digest of the whole, the bytes of the chunks that share a line."""
    found = Counter[tuple[str, str]]()
    for line in lines:
        if "calls" in line:
            found[line["call"], line["digest"]] += line["bytes"]
    return found


def moved(recording: Recording) -> Counter[tuple[str, str]]:
    """The same, of what left."""
    found = Counter[tuple[str, str]]()
    for one in recording.said:
        if isinstance(one.message, pb.Chunk | pb.GetChunkRequest):
            blob = one.message.upload.rpartition(".")[2] if isinstance(one.message, pb.Chunk) else one.message.digest
            found[one.call, blob] += len(one.data)
    return found


def test_row_91_no_image_no_label_and_no_count_is_in_it(recording: Recording) -> None:
    assert hiding(secrets(recording.data), recording.said, recording.connections) == set()


def test_what_cannot_leave_would_be_found_if_it_did(recipe_of: Callable[..., Recipe]) -> None:
    data = load_data(recipe_of("fedavg"))[RECORDED]
    image, labels = data.train.pixels()[7].numpy(), data.train.labels.numpy()
    leaked = {"weight": image[0], "seen": np.bincount(labels, minlength=data.classes), "order": labels}
    said = [
        SentMessage(call, message.SerializeToString(), message) for call, message in handing_in({Part.BODY: leaked})
    ]
    assert hiding(secrets(data), said) >= {"image 7", "counts as int64", "labels as int64"}


def test_row_91_of_an_error_only_its_kind_leaves(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    def load(_: Recipe) -> SiteData:
        raise DataError("cannot read /data/Ann-Other-1961.png")

    recipe = recipe_of("fedavg", rounds=1, federation={"min_sites": 3, "quorum": 2, "heartbeat_s": 0.1})
    recording = record(recipe, tmp_path, load)
    assert hiding({"name": b"Ann", "path": b"data/"}, recording.said, recording.connections) == set()
    beats = of(recording.said, pb.HeartbeatRequest)
    assert {beat.failure for beat in beats} - {pb.FAILURE_REASON_UNSPECIFIED} == {pb.FAILURE_REASON_DATA}
    assert Counter(record.event for record in recording.told)["sent"] == len(recording.said)
