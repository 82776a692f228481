"""What computes predictions: ONNX Runtime, or PyTorch. Each is imported only where it is used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.common import codec
from protofed.common.errors import CodecError, ConfigError, DataError
from protofed.common.payload import Array, Part, Payload
from protofed.common.plugins import PluginKind, is_plugin
from protofed.deploy.export.model_folder import FACTS, GRAPH, WEIGHTS, ModelContents, check_strings, read_file

# Pixels [N, channels, H, W] in 0..1 -> probabilities [N, C].
Predictor: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]
Runtime: TypeAlias = Literal["auto", "onnx", "torch"]
NEEDED = {"onnx": "onnxruntime", "torch": "torch"}
EXTRA = {"onnx": "export", "torch": "client"}
PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


def chosen(folder: Path, contents: ModelContents, runtime: Runtime, device: str) -> Literal["onnx", "torch"]:
    """ONNX Runtime where it is installed, the model was exported for it and no GPU is asked for; else PyTorch.

    Raises:
        ConfigError: neither is there, or not the one that is asked for.
    """
    files: dict[Literal["onnx", "torch"], str] = {"onnx": GRAPH, "torch": WEIGHTS}
    installed = {name: find_spec(package) is not None for name, package in NEEDED.items()}
    if runtime != "auto":
        if not installed[runtime]:
            raise ConfigError(f"{NEEDED[runtime]} is not installed: pip install 'protofed[{EXTRA[runtime]}]'")
        return runtime
    usable = [name for name, file in files.items() if installed[name] and file in contents.files]
    if not usable:
        name: Literal["onnx", "torch"] = "onnx" if GRAPH in contents.files else "torch"
        raise ConfigError(
            f"{folder} holds {' and '.join(contents.files)}, and {NEEDED[name]} is not installed: "
            f"pip install 'protofed[{EXTRA[name]}]'"
        )
    return usable[0] if device == "cpu" or len(usable) == 1 else "torch"


def predictor(
    folder: Path, contents: ModelContents, runtime: Literal["onnx", "torch"], device: str, allowed: frozenset[str]
) -> Predictor:
    """The model, ready.

    Raises:
        DataError: its file is damaged, or another than `model.json` tells of.
        ConfigError: the device is not there, or the architecture cannot be built.
    """
    if runtime == "onnx":
        return _onnx(folder, contents, device)
    return _torch(folder, contents, device, allowed)


def _onnx(folder: Path, contents: ModelContents, device: str) -> Predictor:
    onnxruntime: Any = import_module("onnxruntime")
    kind, _, index = device.partition(":")
    wanted = _providers("cuda" if kind == "auto" and _has_cuda(onnxruntime) else kind.replace("auto", "cpu"), device)
    if not set(wanted) <= set(onnxruntime.get_available_providers()):
        raise ConfigError(f"device '{device}': this onnxruntime has no GPU; take --runtime torch or --device cpu")
    data = read_file(folder, contents, GRAPH)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    settings = [{"device_id": index or "0"} if one.startswith("CUDA") else {} for one in wanted]
    try:
        session = onnxruntime.InferenceSession(data, options, providers=wanted, provider_options=settings)
    except Exception as error:  # its own kinds of errors, and RuntimeError
        raise DataError(f"{folder / GRAPH} cannot be used: {str(error)[:200]}; export the model again") from error
    check_strings(folder / GRAPH, session.get_modelmeta().custom_metadata_map, contents)

    def predict(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = session.run(["probabilities"], {"pixels": pixels})[0]
        return found

    return predict


def _providers(kind: str, device: str) -> list[str]:
    if kind not in PROVIDERS:
        raise ConfigError(f"device '{device}': expected auto, cpu, cuda or cuda:N")
    return PROVIDERS[kind]


def _has_cuda(onnxruntime: Any) -> bool:
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _torch(folder: Path, contents: ModelContents, device: str, allowed: frozenset[str]) -> Predictor:
    from protofed.client.agent import device as devices
    from protofed.client.agent.site import check_model
    from protofed.client.models.catalogue import architectures
    from protofed.client.models.inference import answers, rebuilt

    where, spec, weights = devices.pick(device), contents.model, _weights(folder, contents)
    classes = len(spec.classes)
    own = spec.architecture.name not in set(architectures)
    if own and is_plugin(PluginKind.MODEL, spec.architecture.name) and spec.architecture.name not in allowed:
        raise ConfigError(
            f"the model is made by {spec.architecture.name}, code that is not protofed's; if you trust it and it is "
            f"installed here: --allow-plugin {spec.architecture.name} (or --runtime onnx, which needs no such code)"
        )
    check_model(spec.architecture, spec.input, classes)
    model = rebuilt(spec.architecture, spec.input, classes, spec.head, weights, allowed).to(where)
    return lambda pixels: np.asarray(answers(model, pixels)[1].numpy(), dtype=np.float32)


def _weights(folder: Path, contents: ModelContents) -> Payload:
    """Body and head, checked against both digests."""
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
        found = codec.digest(codec.encode(weights))
    except CodecError as error:
        raise DataError(f"{folder / WEIGHTS} is damaged: {error}; export the model again") from error
    if found != contents.origin.weights:
        raise DataError(f"{folder / WEIGHTS} does not hold the weights that {FACTS} tells of; export the model again")
    return weights
