"""The list of what a machine with a bare PyTorch lacks is what the project needs now."""

from __future__ import annotations

import re

from tests.gpu.__main__ import REQUIREMENTS
from tests.gpu.requirements import PRESENT, lines, text


def test_the_list_is_of_this_tree() -> None:
    assert REQUIREMENTS.read_text(encoding="utf-8") == text(), "renew it as its second line says"


def test_the_list_leaves_out_what_comes_with_pytorch() -> None:
    listed = {re.split("==", line)[0] for line in lines()}
    assert listed >= {"grpcio", "pydantic-core", "blake3", "torchmetrics"}
    assert not listed & {*PRESENT, "scipy", "triton", "pytest"}
    assert not any(name.startswith("nvidia-") for name in listed)
