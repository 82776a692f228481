"""Convert a model to ONNX, with normalisation, softmax and a free batch size."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.models.inference import DeployedModel
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError
from protofed.common.version import install_hint
from protofed.deploy.export.agreement import Answer

PIXELS, OUTPUTS = "pixels", ("logits", "probabilities")
LARGEST = (2 << 30) - (1 << 20)  # bytes; protobuf's limit is 2 GiB, less room for the graph


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


def answer_of(data: bytes) -> Answer:
    """What ONNX Runtime makes of pixels by an ONNX file.

    Raises:
        ConfigError: ONNX Runtime is missing.
    """
    session = _package("onnxruntime").InferenceSession(data, providers=["CPUExecutionProvider"])

    def answer(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        probabilities: NDArray[np.float32] = session.run(["probabilities"], {PIXELS: pixels})[0]
        return probabilities

    return answer


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
