"""A body that a run begins with, from a file that every site has, as in FedPRP's Algorithm 1."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load as parse
from torch import nn

from protofed.client.models.split import load
from protofed.common.codec import Digest, digest, first_not_finite
from protofed.common.config.data import data_folder
from protofed.common.errors import CodecError, ConfigError
from protofed.common.payload import Part, Tensors
from protofed.common.protocol.messages import MOST_BYTES

PREFIX = f"{Part.BODY}."  # of the body's tensors in the `model.safetensors` of an export; its head's are left out


def load_body(body: nn.Module, wanted: Digest) -> None:
    """Load the weights of `<digest>.safetensors` in the folder that `PROTOFED_DATA` names into a body.

    Args:
        wanted: BLAKE3 of the file, as in the `model.json` beside an exported model.

    Raises:
        ConfigError: there is no such file, it is another one, or it does not fit the body.
    """
    folder = data_folder()
    if folder is None:
        raise ConfigError(
            f"model.pretrained_body needs the file {wanted}.safetensors; set PROTOFED_DATA to the folder that has it"
        )
    path = folder / f"{wanted}.safetensors"
    try:
        load(body, _of_body(path, wanted))
    except CodecError as error:
        raise ConfigError(f"model.pretrained_body: {path} does not fit the recipe's model: {error}") from error


def _of_body(path: Path, wanted: Digest) -> Tensors:
    """The file's tensors of the body, by their names in it; its digest is checked before it is parsed."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ConfigError(f"model.pretrained_body: {path} has {size} bytes; expected at most {MOST_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model.pretrained_body: cannot read {path}: {error.strerror}; put the run's pre-trained body there, whose "
            "digest the recipe names"
        ) from error
    if (found := digest(data)) != wanted:
        raise ConfigError(f"model.pretrained_body: {path} has the digest {found}; expected the file of its name")
    try:
        tensors = {name.removeprefix(PREFIX): array for name, array in parse(data).items() if name.startswith(PREFIX)}
    except (SafetensorError, KeyError, ValueError) as error:  # KeyError: a dtype that NumPy has not
        raise ConfigError(f"model.pretrained_body: {path} is no safetensors file: {error}") from error
    if problem := first_not_finite({Part.BODY: tensors}):
        raise ConfigError(f"model.pretrained_body: {path}: {problem} has values that are not finite")
    return tensors
