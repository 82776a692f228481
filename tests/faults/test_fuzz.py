"""Row 50 of the fault table: whatever is sent, only documented codes come back, no trace text, and the server lives.

A service joins by being listed in SERVICES; its calls have to be unary.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google_crc32c import value as crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.invariants import resident_bytes
from tests.support.processes import Processes
from tests.support.raw_client import DOCUMENTED, FEDERATION, MODEL, OPERATOR, RawClient

from protofed.common import codec
from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.protocol import wire
from protofed.common.protocol.messages import PROTOCOL_VERSION
from protofed.deploy.operator.connection import Operator
from protofed.protos.v1 import federation_pb2 as pb

SERVICES: Sequence[ServiceDescriptor] = [FEDERATION, OPERATOR]
METHODS: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]
RUN = "small-fedavg"
SPARE = "spare"  # a run that waits behind it, for orders
LOOKS = ("ShowRun", "VerifyRound")  # at a run; all other calls of the operator's change it
AT_ONCE = 16
# An answer that speaks like Python: a trace, a file's line, or the class of an exception.
TRACE = re.compile(r"Traceback|File \"|line \d+, in |\b[A-Z]\w*(Error|Exception)\b|<class '|\bincident\b")
NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: [0.0, -0.0, 1.0, -1.0, 0.5, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")],
    FieldDescriptor.TYPE_INT32: [0, 1, 7, -1, -(2**31), 2**31 - 1],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 7, 2**31, 2**32 - 1],
    FieldDescriptor.TYPE_FIXED32: [0, 1, 2**31, 2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2, 3, 2**33, 2**53, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_BOOL: [False, True],
}
WORDS = [
    "",
    "a",
    "-",
    "../../x",
    "a\0b",
    "смешно",
    "\U0001f600",
    "a" * 65,
    "x" * 5_000,
    "%s%n{0}",
    "'; drop table updates",
]
LENGTHS = [0, 1, 1, 2, 3, 40]


def path_of(method: MethodDescriptor) -> str:
    """Where a call goes."""
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass(frozen=True)
class Case:
    """One call: bytes for a method."""

    path: str
    data: bytes

    def __repr__(self) -> str:
        return f"{self.path} {self.data[:200].hex()}"


@dataclass
class Draft:
    """A call that is nearly right: each field as `known` has it by its name as often as `care` says, or anything.

    Attributes:
        rng: Python's, or Hypothesis's, which shrinks.
        care: how often a field is there, and right.
    """

    rng: random.Random
    known: Mapping[str, Sequence[Any]]
    care: float = 1.0

    def case(self) -> Case:
        """A message, whole or damaged, or noise."""
        method = self.rng.choice(METHODS)
        if method.containing_service is OPERATOR and method.name not in LOOKS:
            self.known = {**self.known, "run": [SPARE], "site": ["site-9"]}  # the honest site's are to go on
        self.care = self.rng.choice([0.7, 0.95, 0.99, 1.0])
        shape = self.rng.random()
        if shape < 0.1:
            return Case(path_of(method), self.rng.randbytes(self.rng.choice([0, 1, 10, 200])))
        data = self.message(method.input_type).SerializeToString()
        return Case(path_of(method), self.damaged(data) if shape < 0.4 else data)

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A message of this kind."""
        made: Message = GetMessageClass(kind)()
        for described in kind.fields:
            if self.rng.random() < self.care:
                self._fill(made, described, depth)
        return made

    def damaged(self, data: bytes) -> bytes:
        """Cut, flipped, doubled, spliced or with something foreign in it."""
        at, until = sorted((self.rng.randint(0, len(data)), self.rng.randint(0, len(data))))
        noise = self.rng.randbytes(3)
        ways = [
            data[:at],
            data[at:],
            data[:at] + data[until:],
            data[:until] + data[at:],
            data[:at] + noise[:1] + data[at + 1 :],
            data[:at] + noise + data[at:],
            data + b"\xfa\x3f\x03abc",  # a field that nobody knows
            data + b"\x0b" * 200,  # groups that never end
        ]
        return self.rng.choice(ways)

    def _fill(self, made: Message, described: FieldDescriptor, depth: int) -> None:
        field_of, inner = getattr(made, described.name, None), described.message_type
        count = self.rng.choice(LENGTHS) if described.is_repeated else 1
        if inner is not None and inner.GetOptions().map_entry:
            for _ in range(count):
                field_of[self._plain("key", FieldDescriptor.TYPE_STRING)] = self._plain("number", 1)  # type: ignore[index]
        elif inner is not None:
            for _ in range(count if depth < 5 else 0):
                target = field_of.add() if described.is_repeated else field_of  # type: ignore[union-attr]
                target.CopyFrom(self.message(inner, depth + 1))  # type: ignore[union-attr]
        elif described.is_repeated:
            field_of.extend(self._value(described) for _ in range(count))  # type: ignore[union-attr]
        else:
            setattr(made, described.name, self._value(described))

    def _value(self, described: FieldDescriptor) -> Any:
        if described.enum_type is None:
            return self._plain(described.name, described.type)
        numbers = [value.number for value in described.enum_type.values]
        return self.rng.choice(numbers[1:] if self.rng.random() < self.care else [0, 99, -1])

    def _plain(self, name: str, kind: int) -> Any:
        if name in self.known and self.rng.random() < self.care:
            return self.rng.choice(self.known[name])
        if kind == FieldDescriptor.TYPE_BYTES:
            return self.rng.randbytes(self.rng.choice([0, 1, 288]))
        return self.rng.choice(NUMBERS.get(kind, WORDS))


@dataclass
class Target:
    """A server in a process of its own, and a site that goes on with its work between the cases."""

    processes: Processes
    known: dict[str, list[Any]] = field(default_factory=dict)
    site: str = "site-1"
    lives: int = 0

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.processes.address)
        self.stubs: dict[str, Any] = {path_of(method): self.channel.unary_unary(path_of(method)) for method in METHODS}
        self.data = codec.encode(MODEL)
        self.spare = self.processes.recipe.model_copy(update={"name": SPARE}).wire()
        with Operator(self.processes.address, NO_TLS) as operator:
            operator.start(self.processes.recipe.model_copy(update={"name": SPARE}))

    def case(self, rng: random.Random) -> Case:
        """What a hostile site could send now."""
        return Draft(rng, self.known).case()

    def send(self, case: Case) -> Any:
        """The call, under way."""
        return self.stubs[case.path].future(case.data, timeout=60.0)

    def check(self, case: Case, call: Any) -> None:
        """Whether the answer is one that is documented, and says nothing of the server's insides."""
        code, text = call.code(), call.details() or ""
        assert code in DOCUMENTED, f"{code}: {text} for {case}"
        assert not TRACE.search(text), f"{code}: {text} for {case}"
        assert len(text) < 600, f"{code}: {len(text)} characters for {case}"

    def work(self) -> None:
        """An honest site takes part in a round, and tells what it was told."""
        try:
            self._take_part()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self.site = f"site-{self.lives}"  # calls in its name have used up its hour: another site comes
            self._take_part()

    def _take_part(self) -> None:
        self.lives += 1
        site = RawClient(self.processes.address, RUN, self.site, instance=f"honest-{self.lives}").enroll()
        try:
            site.push(site.task())
            task = site.task()
            ticket = site.say("BeginUpload", site.announcement(task, self.data, MODEL))
            self.learn(site, task, ticket.upload.id)
        finally:
            site.channel.close()

    def learn(self, site: RawClient, task: pb.Task, upload: str) -> None:
        """What a hostile site could know."""
        digest = codec.digest(self.data)
        self.known = {
            "site": [site.site],
            "instance": [site.instance],
            "run": [RUN],
            "task_id": [task.task_id],
            "base_digest": [task.base_digest],
            "digest": [task.base_digest, digest, "0" * 64],
            "digest_algorithm": [wire.DIGEST_ALGORITHM],
            "upload": [upload],
            "protocol_version": [PROTOCOL_VERSION],
            "data": [self.data, self.data[:-1]],
            "crc32c": [crc32c(self.data)],
            "part": [1, 2],
            "name": ["w", "weight"],
            "dtype": ["float32"],
            "shape": [2, 3, 10],
            "total_bytes": [len(self.data)],
            "index": [0, 0, 1],
            "wait_s": [0.0, float("nan"), -1.0],
            "key": ["loss", "accuracy", "a.b"],
            "number": [0.5, 1.0],
            "weight": [1.0, 100.0],
            "recipe": [
                self.spare,
                self.spare.replace(SPARE, "another"),
                self.spare[:-1],
                *(self.spare.replace(word, "x" * 2_000, 1) for word in ("fedavg", "digits-cnn", "rounds", SPARE)),
            ],
            "round": [0, 1, 2],
            "attempt": [1],
        }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, recipe_of: Callable[..., Recipe]) -> Iterator[Target]:
    rules = {"min_sites": 1, "quorum": 1, "score_every": 0, "grace": 0.0, "deadline_s": 1.0, "max_attempts": 1_000_000}
    processes = Processes.of(
        Path(tmp_path_factory.mktemp("fuzz")), recipe_of("fedavg", rounds=100_000, federation=rules)
    )
    processes.server()
    try:
        made = Target(processes)
        made.work()
        yield made
        made.channel.close()
    finally:
        processes.kill("server")


@settings(max_examples=500, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_row_50_fuzzed_calls_meet_documented_codes_only(target: Target, rng: random.Random) -> None:
    case = target.case(rng)
    target.check(case, target.send(case))


def test_row_50_after_them_the_server_works_on(target: Target) -> None:
    target.work()
    assert target.processes.running["server"].poll() is None
    with Operator(target.processes.address, NO_TLS) as operator:
        assert operator.show(RUN).info.status == "running"
        assert SPARE in [info.run for info in operator.runs()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_row_50_a_hundred_thousand_cases_leave_memory_flat(target: Target) -> None:
    rng, free = random.Random(50), threading.Semaphore(AT_ONCE)  # noqa: S311  (the same cases every time)
    process, under_way = target.processes.running["server"], []
    resident: list[int] = []
    for _ in range(100):
        target.work()
        resident.append(resident_bytes(process.pid))
        for _ in range(1_000):
            free.acquire()
            case = target.case(rng)
            call = target.send(case)
            call.add_done_callback(lambda _: free.release())
            under_way.append((case, call))
        waiting = []  # for a task, up to 20 seconds
        for case, call in under_way:
            if call.done():
                target.check(case, call)
            else:
                waiting.append((case, call))
        under_way = waiting
    for case, call in under_way:
        target.check(case, call)
    target.work()
    assert process.poll() is None
    assert resident_bytes(process.pid) - resident[20] < 32 << 20, [size >> 20 for size in resident]
