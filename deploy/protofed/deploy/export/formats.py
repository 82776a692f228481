"""The formats of an exported model: ONNX, with normalisation, predictions and a free batch size; and the weights alone.

What is written is checked before: it predicts as the model does.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.client.models.inference import DeployedModel, predict, rebuild
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import ConfigError, ProtofedError
from protofed.common.version import install_hint

Answer: TypeAlias = Callable[[NDArray[np.float32]], Sequence[NDArray[np.float32]]]
# Pixels [N, ...] -> outputs and predictions, [N, C] each.
PREDICTIONS = "predictions"
PIXELS, OUTPUTS = "pixels", ("outputs", PREDICTIONS)
BATCH_SIZES = (1, 3, 8)  # images per batch; one, and sizes other than the 2 with which ONNX is traced
# A share of the largest value, or of 1 if that is larger. Float32 sums in another order differ by less than 1e-5.
# Outputs are compared, too: predictions of a regression may have a small range.
TOLERANCE = 1e-4


class ExportError(ProtofedError):
    """A file and the model predict differently; nothing was written."""

    exit_code = 1


def difference(model: DeployedModel, images: Input, answer: Answer, seed: int = 0) -> float:
    """The largest absolute difference of predictions between the model and a file, on uniform random images.

    Args:
        answer: what the file computes.

    Raises:
        ExportError: they differ by more than rounding.
    """
    rng, worst = np.random.default_rng(seed), 0.0
    for count in BATCH_SIZES:
        pixels = rng.random((count, *images.shape), dtype=np.float32)
        for name, given, tensor in zip(OUTPUTS, answer(pixels), predict(model, pixels), strict=True):
            expected = tensor.numpy()
            finite = np.isfinite(expected)  # an output of the head `nearest` may be minus infinity
            apart = float(np.abs(given[finite] - expected[finite]).max(initial=0.0))
            limit = TOLERANCE * float(np.abs(expected[finite]).max(initial=1.0))
            if not apart <= limit or not np.array_equal(given[~finite], expected[~finite]):
                raise ExportError(f"file and model differ by {apart:.1e} in {name}; expected at most {limit:.1e}")
            worst = max(worst, apart) if name == PREDICTIONS else worst
    return worst


def check_weights(
    model: DeployedModel,
    choice: NamedOptions,
    images: Input,
    classes: int,
    task: NamedOptions,
    allowed: frozenset[str],
) -> None:
    """Check that the model can be made again from its weights, as `protofed predict` makes it.

    Args:
        choice: the architecture, with options.
        task: as of `rebuild`.
        allowed: plug-ins that may be imported; the head's class already is.

    Raises:
        ConfigError: the head cannot be made again.
        ExportError: it can, and predicts something else.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            again = rebuild(choice, images, classes, model.head, model.weights(), task, allowed | {model.head})
    except ConfigError as error:
        raise ConfigError(
            f"{error}; a method's own head derives from MethodHead of protofed.client.method, and says how it is made: "
            "do that, or take --format onnx"
        ) from error
    difference(model, images, lambda pixels: [tensor.numpy() for tensor in predict(again, pixels)])


LARGEST = (2 << 30) - (1 << 20)  # bytes; protobuf's limit is 2 GiB, less room for the graph


def to_onnx(model: DeployedModel, images: Input, metadata: Mapping[str, str]) -> bytes:
    """Convert the model.

    Returns:
        The ONNX file: input `pixels` float32 [N, channels, H, W] in 0..1, outputs `outputs` and `predictions` float32
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


def run_onnx(data: bytes) -> Answer:
    """What ONNX Runtime makes of pixels by an ONNX file.

    Raises:
        ConfigError: ONNX Runtime is missing.
    """
    session = _package("onnxruntime").InferenceSession(data, providers=["CPUExecutionProvider"])

    def answer(pixels: NDArray[np.float32]) -> Sequence[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = session.run(list(OUTPUTS), {PIXELS: pixels})
        return found

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
