"""A model as ONNX: normalisation and softmax inside, batches of any size, checked against PyTorch."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from protofed.client.models.inference import DeployedModel, answers
from protofed.common.config.recipe import Input
from protofed.common.errors import ConfigError, ProtofedError

PIXELS, OUTPUTS = "pixels", ("logits", "probabilities")
TRIED = (1, 3, 8)  # images a batch
TOLERANCE = 1e-4  # of probabilities; float32 in another order of sums differs by less than 1e-5
LARGEST = (2 << 30) - (1 << 20)  # bytes of one protobuf


class ExportError(ProtofedError):
    """The exported model does not answer as the original does; nothing was written."""

    exit_code = 1


def to_onnx(model: DeployedModel, images: Input, metadata: Mapping[str, str]) -> bytes:
    """Input `pixels` float32 [N, channels, H, W] in 0..1; outputs `logits` and `probabilities` float32 [N, C].

    Raises:
        ConfigError: a package is missing, the model is larger than an ONNX file may be, or (an own model) has layers
            that ONNX does not know.
    """
    onnx = _package("onnx")
    _package("onnxscript")
    said = io.StringIO()  # progress, and advice to those who wrote the exporter
    batch = (torch.zeros(2, *images.shape),)
    if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) > LARGEST:
        raise ConfigError("the model is larger than 2 GiB, which one ONNX file cannot hold; take --format safetensors")
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), torch.no_grad():
            program = torch.onnx.export(
                model,
                batch,
                dynamo=True,
                verbose=False,
                input_names=[PIXELS],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: torch.export.Dim("N")},),
            )
    except Exception as error:  # an own model's layers: torch raises many kinds
        line = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(f"the model cannot be made ONNX: {line}; take --format safetensors") from error
    assert program is not None  # noqa: S101  (with dynamo there is one)
    proto: Any = program.model_proto
    _bare(proto)
    onnx.helper.set_model_props(proto, dict(metadata))
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString(deterministic=True))


def difference(model: DeployedModel, images: Input, data: bytes, seed: int = 0) -> float:
    """The largest absolute difference of probabilities between ONNX Runtime and PyTorch, on random images.

    Raises:
        ConfigError: ONNX Runtime is missing.
        ExportError: they differ by more than rounding.
    """
    session = _package("onnxruntime").InferenceSession(data, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(seed)
    worst = 0.0
    for count in TRIED:
        pixels = rng.random((count, *images.shape), dtype=np.float32)
        _, expected = answers(model, pixels)
        found = session.run(["probabilities"], {PIXELS: pixels})[0]
        worst = max(worst, float(np.abs(found - expected.numpy()).max()))
    if math.isnan(worst) or worst > TOLERANCE:
        raise ExportError(
            f"ONNX Runtime and PyTorch differ by {worst:.1e} in probabilities; expected at most {TOLERANCE}"
        )
    return worst


def _bare(proto: Any) -> None:
    """Without what the exporter notes of this machine's files."""
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    del proto.graph.metadata_props[:]
    del proto.metadata_props[:]
    proto.doc_string = proto.graph.doc_string = ""


def _package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name} is not installed: ONNX needs pip install 'protofed[export]'") from error
