"""Telemetry is a closed list: what is not on it is not heard, and what cannot be a measurement is refused."""

from __future__ import annotations

import math

import pytest

from protofed.common.errors import ProtocolError
from protofed.common.protocol import wire
from protofed.common.protocol.messages import MAX_NUMBERS, Activity, Progress, Telemetry, read_telemetry
from protofed.protos.v1 import federation_pb2 as pb

NUMBERS = {name.value: 1.5 + number for number, name in enumerate(Telemetry)}


def test_the_list_is_closed_and_says_what_each_number_discloses() -> None:
    names = ("gpu_memory_bytes", "disk_free_bytes", "step_seconds", "policy_refusals", "bytes_released")
    assert set(Telemetry) == set(names)
    assert all(name.discloses.endswith(".") for name in Telemetry)
    assert len({name.discloses for name in Telemetry}) == len(Telemetry) < MAX_NUMBERS


def test_it_comes_back_from_the_wire() -> None:
    progress = Progress("n", Activity.TRAINING, telemetry=NUMBERS)
    message = pb.HeartbeatRequest.FromString(pb.HeartbeatRequest(**wire.pack_progress(progress)).SerializeToString())
    assert wire.unpack_progress(message).telemetry == NUMBERS


def test_a_newer_client_may_say_more_and_is_heard_as_far_as_it_is_understood() -> None:
    newer = NUMBERS | {"fan_speed": math.nan, "samples": 100.0}
    assert read_telemetry(newer) == NUMBERS
    assert read_telemetry({f"newer_{number}": 0.0 for number in range(MAX_NUMBERS)}) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-9])
def test_what_is_no_measurement_is_refused(bad: float) -> None:
    message = pb.HeartbeatRequest(activity=pb.ACTIVITY_IDLE, telemetry=NUMBERS | {"step_seconds": bad})
    with pytest.raises(ProtocolError, match=r"step_seconds is .*finite"):
        wire.unpack_progress(message)


def test_no_heartbeat_is_a_long_one() -> None:
    many = {f"name_{number}": 0.0 for number in range(MAX_NUMBERS + 1)}
    with pytest.raises(ProtocolError, match=f"{MAX_NUMBERS + 1} numbers of telemetry: expected at most {MAX_NUMBERS}"):
        wire.unpack_progress(pb.HeartbeatRequest(activity=pb.ACTIVITY_IDLE, telemetry=many))


def test_progress_is_the_same_whatever_the_telemetry() -> None:
    plain, telling = Progress("n", Activity.TRAINING), Progress("n", Activity.TRAINING, telemetry=NUMBERS)
    assert plain == telling
    assert hash(plain) == hash(telling)
