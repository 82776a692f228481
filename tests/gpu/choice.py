"""Device choice: the settings' names, data and batches on the device, and that it computes what the CPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from tests.gpu.fits import examples, fit_context
from tests.gpu.plan import Proof, at_most, judged, skipped
from tests.gpu.report import Finding, Found, Status

from protofed.client.data.augmentation import AUGMENTATIONS
from protofed.client.data.site_data import CPU, SiteData
from protofed.client.device import pick_device
from protofed.client.models.split import dump, load
from protofed.common.config.recipe import Augment
from protofed.common.errors import UnavailableError

WAYS: tuple[Augment, ...] = ("none", *AUGMENTATIONS)


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    yield judged("device = 'auto' picks", pick_device("auto").type, proof.device.type)
    yield judged(f"device = '{proof.device}' picks", str(pick_device(str(proof.device))), str(proof.device))
    yield _absent(f"cuda:{torch.cuda.device_count()}")
    yield at_most("features of ResNet-18 in float64, relative difference from the CPU's", _features(proof), 1e-9)
    yield judged("numbers of a model that a payload from and to the device changes", _payload(proof), 0)
    count = 96 if proof.rehearsal else 2000
    here = SiteData(examples(count), examples(2), fit_context(CPU, examples(2)).data.input, 10)
    there = here.placed(proof.device)
    yield judged("a site's images lie on", there.train.pixels().device.type, proof.device.type)
    yield _batches("batches, all augmentations: pixels that differ from the CPU's", here, there)
    if proof.rehearsal:
        yield skipped("batches of images that stay in the host's memory", "needs a GPU")
    else:
        yield _batches("the same of images that stay in the host's memory", here, replace(here, device=proof.device))


def _absent(name: str) -> Finding:
    try:
        return Finding(f"device = '{name}'", f"picked {pick_device(name)}", "refused", Status.FAILED)
    except UnavailableError:
        return Finding(f"device = '{name}', which is not there", "refused", "refused")


def _payload(proof: Proof) -> int:
    there, here, again = (fit_context(device, examples(2)).model for device in (proof.device, CPU, proof.device))
    load(there, dump(here))
    with torch.no_grad():
        for tensor in again.state_dict().values():
            tensor.zero_()
    load(again, dump(there))
    expected, found = here.state_dict(), again.state_dict()
    return sum(int((found[name].cpu() != tensor).sum()) for name, tensor in expected.items())


def _features(proof: Proof) -> float:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for device in (CPU, proof.device):
        model = fit_context(device, examples(2)).model.double().eval()
        with torch.no_grad():
            found.append(model.body(images.to(device)).cpu())
    return float((found[1] - found[0]).norm() / found[0].norm())


def _batches(what: str, here: SiteData, there: SiteData) -> Finding:
    """All pixels of an epoch of each augmentation: documented to be the same on every device."""
    different = total = 0
    for way in WAYS:
        pairs = (data.batches(64, torch.Generator().manual_seed(2), way) for data in (here, there))
        for (own, own_labels), (other, other_labels) in zip(*pairs, strict=True):
            different += int((own != other.cpu()).sum()) + int((own_labels != other_labels.cpu()).sum())
            total += own.numel()
    return judged(what, f"{different} of {total}", f"0 of {total}", "0")
