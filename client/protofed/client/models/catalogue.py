"""Models by name, and plug-ins where the site's policy lists them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from safetensors import SafetensorError
from safetensors.numpy import load as parse
from torch import nn

from protofed.client.models.networks import MLP, Conv2Cifar, DigitsCNN, FedAvgCNN, ResNet18, ResNet50, SimpleCNN
from protofed.client.models.split import SplitModel, dump, load
from protofed.common.codec import Digest, digest, first_not_finite
from protofed.common.config.data import data_folder
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Part, Payload, Tensors
from protofed.common.plugins import PluginKind, Registry, error_line
from protofed.common.plugins import load as load_plugin
from protofed.common.protocol.messages import MAX_BYTES

FACTORY = "a factory(input, classes, **options) that returns a SplitModel"


class Architecture(Protocol):
    """A frozen dataclass whose fields are the options of one model."""

    smallest: ClassVar[int]  # pixels a side that the model needs at least

    def build(self, images: Input, classes: int) -> SplitModel:
        """A fresh model, its parameters drawn from torch's global generator."""
        ...


architectures: Registry[Architecture] = Registry("model")
architectures.register("mlp")(MLP)
architectures.register("digits-cnn")(DigitsCNN)
architectures.register("conv2cifar")(Conv2Cifar)
architectures.register("fedavg-cnn")(FedAvgCNN)
architectures.register("simple-cnn")(SimpleCNN)
architectures.register("resnet18")(ResNet18)
architectures.register("resnet50")(ResNet50)


def build(choice: NamedOptions, images: Input, classes: int, allowed: frozenset[str] = frozenset()) -> SplitModel:
    """The model of a recipe, on the CPU, checked by one forward pass of blank images.

    Parameters are drawn from torch's global generator, which that pass leaves as it is.

    Args:
        choice: a name of the catalogue, or a plug-in, with options.
        images: what the model will be given.
        classes: C, the number of logits.
        allowed: the plug-ins that the site's own policy lists. Nothing else is ever imported: the recipe comes from
            the server, and a server must not make a site run code of its choosing.

    Raises:
        ConfigError: unknown name or option, a plug-in that is not allowed or not usable, or a model that does not map
            these images to logits [B, C].
    """
    if choice.name in set(architectures):
        model = _from_catalogue(choice, images, classes)
    else:
        model = _from_plugin(choice, images, classes, allowed)
    _check(choice.name, model, images, classes)
    return model


def _from_catalogue(choice: NamedOptions, images: Input, classes: int) -> SplitModel:
    architecture = architectures.build(choice.name, choice.options)
    if min(images.shape[1:]) < (side := architecture.smallest):
        raise ConfigError(
            f"model {choice.name} needs images of at least {side}x{side} pixels: "
            f"the recipe's input.shape is {list(images.shape)}"
        )
    return architecture.build(images, classes)


def _from_plugin(choice: NamedOptions, images: Input, classes: int, allowed: frozenset[str]) -> SplitModel:
    factory = load_plugin(PluginKind.MODEL, choice.name, architectures, allowed)
    try:
        model = factory(images, classes, **choice.options)
    except Exception as error:  # it is the user's code: it may raise anything
        options = ", ".join(choice.options) or "none"
        raise ConfigError(
            f"model '{choice.name}' failed with options: {options}: {error_line(error)}; expected {FACTORY}"
        ) from error
    if not isinstance(model, SplitModel):
        raise ConfigError(f"model '{choice.name}' returned a {type(model).__name__}: expected {FACTORY}")
    return model


def _check(name: str, model: SplitModel, images: Input, classes: int) -> None:
    """Refuse a model that does not map two blank images to [2, D] features and [2, C] logits; note D in it."""
    expected = f"expected features [2, D] and logits [2, {classes}]"
    images_text = f"2 images of {list(images.shape)}"
    try:
        features, logits = _shapes(model, images)
    except Exception as error:  # torch raises several kinds, a user's own layer any
        raise ConfigError(f"model '{name}' cannot take {images_text}: {error_line(error)}; {expected}") from error
    if len(features) != 2 or logits != (2, classes):
        raise ConfigError(
            f"model '{name}' gives features {list(features)} and logits {list(logits)} for {images_text}: {expected}"
        )
    model.features = features[1]


def _shapes(model: SplitModel, images: Input) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of features and logits; a copy computes them, so that modes, buffers and the global generator stay."""
    # Two images, so that a lost batch dimension shows.
    trial = copy.deepcopy(model).eval()
    blank = torch.zeros(2, *images.shape)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return tuple(trial.body(blank).shape), tuple(trial(blank).shape)


def first(recipe: Recipe, allowed: frozenset[str]) -> SplitModel:
    """A recipe's model as its run begins, drawn from torch's global generator, but for a pre-trained body.

    Raises:
        ConfigError: as of `build`, and of `load_body`.
    """
    model = build(recipe.model, recipe.input, recipe.classes, allowed)
    if recipe.model.pretrained_body is not None:
        load_body(model.body, Digest(recipe.model.pretrained_body))
    return model


def device_model(recipe: Recipe, device: torch.device, allowed: frozenset[str]) -> SplitModel:
    """A recipe's model on the device where it is trained; a daemon and a simulation call it when a run begins."""
    model = first(recipe, allowed)
    model.to(device=device)
    model.to(memory_format=torch.channels_last)  # convolutions are 1.2 to 2 times faster, on CPUs, too
    return model


def first_model(recipe: Recipe, plugins: frozenset[str]) -> Payload:
    """BODY and HEAD, drawn on the CPU from the seed: the same on every site, and nothing of any site's data.

    A pre-trained body is read from the site's own copy of it, by its digest in the recipe.

    Args:
        plugins: those that the site's policy lists.

    Raises:
        ConfigError: the recipe's model cannot be built, or this site has not its pre-trained body.
    """
    with torch.random.fork_rng():  # the global generator also serves the site's own layers
        torch.manual_seed(recipe.seed)
        model = first(recipe, plugins)
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}


PREFIX = f"{Part.BODY}."  # of the body's tensors in the `model.safetensors` of an export; its head's are left out


def load_body(body: nn.Module, expected: Digest) -> None:
    """Load the weights of `<digest>.safetensors` in the folder that `PROTOFED_DATA` names into a body.

    Args:
        expected: BLAKE3 of the file, as in the `model.json` beside an exported model.

    Raises:
        ConfigError: there is no such file, it is another one, or it does not fit the body.
    """
    folder = data_folder()
    if folder is None:
        raise ConfigError(
            f"model.pretrained_body needs the file {expected}.safetensors; set PROTOFED_DATA to the folder that has it"
        )
    path = folder / f"{expected}.safetensors"
    try:
        load(body, _of_body(path, expected))
    except CodecError as error:
        raise ConfigError(f"model.pretrained_body: {path} does not fit the recipe's model: {error}") from error


def _of_body(path: Path, expected: Digest) -> Tensors:
    """The file's tensors of the body, by their names in it; its digest is checked before it is parsed."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"model.pretrained_body: {path} has {size} bytes; expected at most {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model.pretrained_body: cannot read {path}: {error.strerror}. Put the run's pre-trained body there; "
            "its digest is in the recipe"
        ) from error
    if (actual := digest(data)) != expected:
        raise ConfigError(
            f"model.pretrained_body: {path} has the digest {actual}; expected the digest in the file's name"
        )
    try:
        tensors = {name.removeprefix(PREFIX): array for name, array in parse(data).items() if name.startswith(PREFIX)}
    except (SafetensorError, KeyError, ValueError) as error:  # KeyError: a dtype that NumPy has not
        raise ConfigError(f"model.pretrained_body: {path} is no safetensors file: {error}") from error
    if problem := first_not_finite({Part.BODY: tensors}):
        raise ConfigError(f"model.pretrained_body: {path}: {problem} has values that are not finite")
    return tensors
