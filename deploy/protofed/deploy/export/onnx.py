"""Convert a model to ONNX, with normalisation, softmax and a free batch size, and check it against PyTorch."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from protofed.client.models.inference import DeployedModel, predict
from protofed.common.config.recipe import Input
from protofed.common.errors import ConfigError, ProtofedError
from protofed.common.version import install_hint

PIXELS, OUTPUTS = "pixels", ("logits", "probabilities")
BATCH_SIZES = (1, 3, 8)  # images per batch in the check; one, and sizes other than the 2 of the trace
TOLERANCE = 1e-4  # of probabilities; float32 sums in another order differ by less than 1e-5
LARGEST = (2 << 30) - (1 << 20)  # bytes; protobuf's limit is 2 GiB, less room for the graph


class ExportError(ProtofedError):
    """The exported model and the original give different probabilities; nothing was written."""

    exit_code = 1


def to_onnx(model: DeployedModel, images: Input, metadata: Mapping[str, str]) -> bytes:
    """Convert the model.

    Returns:
        The ONNX file: input `pixels` float32 [N, channels, H, W] in 0..1, outputs `logits` and `probabilities` float32
        [N, C].

    Raises:
        ConfigError: a package is missing, the model is larger than 2 GiB, or it has layers that ONNX does not have.
    """
    onnx = _package("onnx")
    _package("onnxscript")
    output = io.StringIO()  # the exporter prints progress and developer warnings; neither is for the user
    batch = (torch.zeros(2, *images.shape),)
    if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) > LARGEST:
        raise ConfigError("the model is larger than 2 GiB, which one ONNX file cannot hold; take --format safetensors")
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), torch.no_grad():
            program = torch.onnx.export(
                model,
                batch,
                dynamo=True,
                verbose=False,
                input_names=[PIXELS],
                output_names=list(OUTPUTS),
                dynamic_shapes=({0: torch.export.Dim("N")},),
            )
    except Exception as error:  # torch raises many classes for layers that it cannot convert
        line = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(f"the model cannot be made ONNX: {line}; take --format safetensors") from error
    assert program is not None  # noqa: S101  (with dynamo there is one)
    proto: Any = program.model_proto
    _strip_metadata(proto)
    onnx.helper.set_model_props(proto, dict(metadata))
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString(deterministic=True))


def difference(model: DeployedModel, images: Input, data: bytes, seed: int = 0) -> float:
    """The largest absolute difference of probabilities between ONNX Runtime and PyTorch, on uniform random images.

    Raises:
        ConfigError: ONNX Runtime is missing.
        ExportError: they differ by more than rounding.
    """
    session = _package("onnxruntime").InferenceSession(data, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(seed)
    worst = 0.0
    for count in BATCH_SIZES:
        pixels = rng.random((count, *images.shape), dtype=np.float32)
        _, expected = predict(model, pixels)
        actual = session.run(["probabilities"], {PIXELS: pixels})[0]
        worst = max(worst, float(np.abs(actual - expected.numpy()).max()))
    if math.isnan(worst) or worst > TOLERANCE:
        raise ExportError(
            f"ONNX Runtime and PyTorch differ by {worst:.1e} in probabilities; expected at most {TOLERANCE}"
        )
    return worst


def _strip_metadata(proto: Any) -> None:
    """Remove the exporter's stack traces: they contain paths of this machine, and differ from machine to machine."""
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
        raise ConfigError(f"{name} is not installed, which ONNX needs: {install_hint('export')}") from error
