"""`protofed predict`: what an exported model predicts of images.

ONNX Runtime or PyTorch computes them. Each is imported only when used: either may be missing.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.common import codec
from protofed.common.config.tasks import CLASSIFICATION, tasks
from protofed.common.csv_cells import CsvTable
from protofed.common.errors import CodecError, ConfigError, DataError
from protofed.common.payload import Array, Part, Payload
from protofed.common.plugins import PluginKind, is_plugin
from protofed.common.storage.files import TEMPORARY, write_error
from protofed.common.version import install_hint
from protofed.deploy.export import model_folder
from protofed.deploy.export.images import ImageSource, UnreadableFile, batches, read_images
from protofed.deploy.export.model_folder import FACTS, GRAPH, WEIGHTS, ModelContents, check_strings, read_file
from protofed.deploy.progress import progress

# Pixels [N, channels, H, W] in 0..1 -> the task's predictions [N, C].
Predictor: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Runtime: TypeAlias = Literal["auto", "onnx", "torch"]
NEEDED = {"onnx": "onnxruntime", "torch": "torch"}
EXTRA = {"onnx": "export", "torch": "client"}
PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


def chosen(folder: Path, contents: ModelContents, runtime: Runtime, device: str) -> Literal["onnx", "torch"]:
    """Choose the runtime: ONNX Runtime if it is installed, the model has an ONNX file and `device` is cpu.

    Raises:
        ConfigError: the requested runtime, or any that fits the model's files, is not installed.
    """
    files: dict[Literal["onnx", "torch"], str] = {"onnx": GRAPH, "torch": WEIGHTS}
    installed = {name: find_spec(package) is not None for name, package in NEEDED.items()}
    if runtime != "auto":
        if not installed[runtime]:
            raise ConfigError(f"{NEEDED[runtime]} is not installed: {install_hint(EXTRA[runtime])}")
        return runtime
    usable = [name for name, file in files.items() if installed[name] and file in contents.files]
    if not usable:
        name: Literal["onnx", "torch"] = "onnx" if GRAPH in contents.files else "torch"
        raise ConfigError(
            f"{folder} holds {' and '.join(contents.files)}, and {NEEDED[name]} is not installed: "
            f"{install_hint(EXTRA[name])}"
        )
    return usable[0] if device == "cpu" or len(usable) == 1 else "torch"


def predictor(
    folder: Path, contents: ModelContents, runtime: Literal["onnx", "torch"], device: str, allowed: frozenset[str]
) -> Predictor:
    """Load the model.

    Returns:
        A function of pixels float32 [N, channels, H, W] in 0..1 to predictions float32 [N, C].

    Raises:
        DataError: the file is damaged, or `model.json` describes another one.
        ConfigError: the device is not available, or the architecture cannot be built.
    """
    if runtime == "onnx":
        return _onnx(folder, contents, device)
    return _torch(folder, contents, device, allowed)


def _onnx(folder: Path, contents: ModelContents, device: str) -> Predictor:
    onnxruntime: Any = import_module("onnxruntime")
    kind, _, index = device.partition(":")
    providers = _providers("cuda" if kind == "auto" and _has_cuda(onnxruntime) else kind.replace("auto", "cpu"), device)
    if not set(providers) <= set(onnxruntime.get_available_providers()):
        raise ConfigError(f"device '{device}': this onnxruntime has no GPU; take --runtime torch or --device cpu")
    data = read_file(folder, contents, GRAPH)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # 3: errors only; its warnings about the graph do not concern the user
    settings = [{"device_id": index or "0"} if provider.startswith("CUDA") else {} for provider in providers]
    try:
        session = onnxruntime.InferenceSession(data, options, providers=providers, provider_options=settings)
    except Exception as error:  # onnxruntime raises classes of its own, and RuntimeError
        raise DataError(f"{folder / GRAPH} cannot be used: {str(error)[:200]}; export the model again") from error
    check_strings(folder / GRAPH, session.get_modelmeta().custom_metadata_map, contents)

    def predict(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        predictions: NDArray[np.float32] = session.run(["predictions"], {"pixels": pixels})[0]
        return predictions

    return predict


def _providers(kind: str, device: str) -> list[str]:
    if kind not in PROVIDERS:
        raise ConfigError(f"device '{device}': expected auto, cpu, cuda or cuda:N")
    return PROVIDERS[kind]


def _has_cuda(onnxruntime: Any) -> bool:
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _torch(folder: Path, contents: ModelContents, device: str, allowed: frozenset[str]) -> Predictor:
    from protofed.client.device import pick_device
    from protofed.client.models import inference
    from protofed.client.models.catalogue import architectures
    from protofed.client.models.split import HEADS, OWN
    from protofed.client.site import check_model

    where, spec, weights = pick_device(device), contents.model, _weights(folder, contents)
    classes = len(spec.classes)
    known = {*architectures, *HEADS, OWN, *tasks}
    needed = (
        (PluginKind.MODEL, spec.architecture.name),
        (PluginKind.MODEL, spec.head),
        (PluginKind.TASK, spec.task.name),
    )
    for kind, name in needed:
        if name not in known and is_plugin(kind, name) and name not in allowed:
            raise ConfigError(
                f"the model needs the code {name}, which is not part of protofed. If you trust this code and it is "
                f"installed here, add --allow-plugin {name}. Or use --runtime onnx, which needs no such code"
            )
    check_model(spec.architecture, spec.input, classes)
    model = inference.rebuild(spec.architecture, spec.input, classes, spec.head, weights, spec.task, allowed)
    model = model.to(where)
    return lambda pixels: np.asarray(inference.predict(model, pixels)[1].numpy(), dtype=np.float32)


def _weights(folder: Path, contents: ModelContents) -> Payload:
    """Read body and head. Two checks: the file's digest, and the digest of the weights as protofed encodes them."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load

    data = read_file(folder, contents, WEIGHTS)
    try:
        flat = load(data)
        with safe_open(folder / WEIGHTS, framework="np") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{folder / WEIGHTS} is damaged: {error}; export the model again") from error
    check_strings(folder / WEIGHTS, metadata, contents)
    weights: dict[Part, dict[str, Array]] = {Part.BODY: {}, Part.HEAD: {}}
    for path, array in flat.items():
        part, _, name = path.partition(".")
        if part not in weights:
            raise DataError(f"{folder / WEIGHTS} has a tensor '{path[:80]}'; expected only body.… and head.…")
        weights[Part(part)][name] = array
    try:
        actual = codec.digest(codec.encode(weights))
    except CodecError as error:
        raise DataError(f"{folder / WEIGHTS} is damaged: {error}; export the model again") from error
    if actual != contents.origin.weights:
        raise DataError(f"{folder / WEIGHTS} does not hold the weights that {FACTS} describes; export the model again")
    return weights


SHOWN = 20  # unreadable images listed; the rest are only counted


@dataclass(frozen=True)
class PredictRequest:
    """The options of one prediction.

    Attributes:
        model: folder that `protofed export` wrote.
        images: where the images are.
        out: the CSV file to write.
        batch: images per batch; it bounds memory.
        allowed: plug-ins that may be imported.
        visible: show a progress bar, on a terminal.
    """

    model: Path
    images: ImageSource
    out: Path
    runtime: Runtime = "auto"
    device: str = "cpu"
    batch: int = 64
    allowed: frozenset[str] = frozenset()
    visible: bool = True


@dataclass
class Predicted:
    """The outcome: which runtime computed, how many images have a row, and which could not be read."""

    runtime: Literal["onnx", "torch"]
    image_count: int = 0
    unreadable: list[UnreadableFile] = field(default_factory=list)


def predict(request: PredictRequest) -> Predicted:
    """Write one row per image: path, class, name, probability, and p_NAME for every class.

    For other tasks than classification a row has the path and a prediction for each output, under its name.

    Rows are in the order of the files' names, or of the .csv. The file appears only when it is complete. Unreadable
    images have no row.

    Raises:
        DataError: the model is missing, damaged or changed, there are no images, or as of `read_images`.
        ConfigError: the runtime is not installed, the device is not available, or as of `read_images`.
    """
    contents = model_folder.read(request.model)
    spec = contents.model
    shape, names = spec.input.shape, spec.classes
    of_classes = spec.task.name == CLASSIFICATION
    runtime = chosen(request.model, contents, request.runtime, request.device)
    answer = predictor(request.model, contents, runtime, request.device, request.allowed)
    images = read_images(request.images, spec.input, request.allowed)
    result = Predicted(runtime)
    with _table(request.out) as file, progress("predicting", len(images), "images", visible=request.visible) as bar:
        table = CsvTable(file)
        of_best = ["class", "name", "probability"] if of_classes else []
        table.row(["path", *of_best, *(f"p_{name}" if of_classes else _heading(name) for name in names)])
        for paths, pixels, unreadable in batches(images, shape, request.batch):
            if paths:
                for path, values in zip(paths, _checked(answer(pixels), len(names)), strict=True):
                    best = _of_best(values, names) if of_classes else []
                    # A float32 has seven digits. Six decimals would hide a number in a small range.
                    numbers = (f"{value:.6f}" if of_classes else f"{value:.7g}" for value in values.tolist())
                    table.row([path, *best, *numbers])
            result.image_count += len(paths)
            result.unreadable += unreadable
            bar.advance(len(paths) + len(unreadable))
    return result


def _heading(name: str) -> str:
    """The heading of an output's column. `path` is the heading of the images' paths."""
    return "path (output)" if name == "path" else name


def _of_best(probabilities: NDArray[np.float32], names: tuple[str, ...]) -> list[object]:
    best = int(np.argmax(probabilities))
    return [best, names[best], f"{float(probabilities[best]):.6f}"]


def _checked(predictions: NDArray[np.float32], outputs: int) -> NDArray[np.float32]:
    if predictions.shape[1:] != (outputs,) or not np.isfinite(predictions).all():
        raise DataError(
            f"the model gives {list(predictions.shape[1:])} values, or values that are not finite; expected {outputs} "
            "predictions: export it again"
        )
    return predictions


@contextmanager
def _table(path: Path) -> Iterator[IO[str]]:
    """Open a text file that gets its name only when it is complete."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; expected the name of a .csv file")
    unfinished = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
        os.replace(unfinished, path)
    except OSError as error:  # of the table only: reading images raises other classes
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
