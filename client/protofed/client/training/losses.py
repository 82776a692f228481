"""Loss terms of the methods as functions of tensors; each is a batch mean.

None of them asks a tensor for its values. Examples and classes that do not count are masked, never left out: else every
step would wait for the GPU to learn how many are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax, normalize

from protofed.client.data.examples import Examples
from protofed.client.models.split import load
from protofed.client.training.context import FitContext
from protofed.common.payload import Part, Payload, distance_norm

Distance: TypeAlias = Literal["euclidean", "cosine", "negated-cosine"]
TINY = 1e-12
SMALL = 1e-8  # FedPHP's released code adds it to a mean squared distance, which may be 0
IGNORED = -100  # a target that `cross_entropy` counts as nothing


def supervised(local: FitContext, logits: Tensor, labels: Tensor) -> Tensor:
    """The task's loss of outputs [B, C] for targets [B, ...]: where a method's paper has the cross-entropy.

    Of classes, the plan may choose another. Class frequencies are those of the site's training labels, and stay there.
    """
    match local.plan.loss:
        case "cross-entropy":
            return local.data.task.loss(logits, labels)
        case "balanced-softmax":
            return balanced_softmax(logits, labels, local.data.label_frequencies())
        case "logit-adjustment":
            return logit_adjusted(logits, labels, local.data.label_frequencies(), local.plan.tau)


def class_shares(weight: Tensor) -> Tensor:
    """Class distribution estimated from a linear head's row norms, [C, D] -> [C] (cwFedAVG's p~; METHODS 3.1)."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms / norms.sum().clamp_min(TINY)


def distribution_gap(weight: Tensor, frequencies: Tensor) -> Tensor:
    """CwFedAVG's weight distribution regularizer: Omega = ||p - p~||_2, not squared. [C, D], [C] -> [].

    At Omega = 0, where it has no derivative, PyTorch's gradient is zero.
    """
    gap: Tensor = torch.linalg.vector_norm(class_shares(weight) - frequencies)
    return gap


def proximal(parameters: Iterable[Tensor], anchor: Iterable[Tensor]) -> Tensor:
    """Half the squared distance of a model to the one it is drawn to: 1/2 ||w - w^t||^2, whose gradient is w - w^t.

    Args:
        parameters: what is trained, tensors of any shapes; at least one.
        anchor: as many, of the same shapes, without gradient.
    """
    squares = [(parameter - at).square().sum() for parameter, at in zip(parameters, anchor, strict=True)]
    return torch.stack(squares).sum() / 2


def balanced_softmax(logits: Tensor, labels: Tensor, frequencies: Tensor) -> Tensor:
    """Cross-entropy of logits + log pi: Ren et al., NeurIPS 2020, eq. (4).

    Training by it makes up for class frequencies, so that the logits themselves treat all classes alike. A class that
    the site does not have gets the logarithm of 1e-12: it is then no alternative, and nothing is infinite.

    Args:
        logits: [B, C].
        labels: [B].
        frequencies: the site's class frequencies pi, [C]; their scale does not matter. They stay at the site.
    """
    return logit_adjusted(logits, labels, frequencies, 1.0)


def logit_adjusted(logits: Tensor, labels: Tensor, frequencies: Tensor, tau: float) -> Tensor:
    """Cross-entropy of logits + tau log pi: Menon et al., ICLR 2021, eq. (10); at tau = 1 it is `balanced_softmax`.

    Args:
        logits: [B, C].
        labels: [B].
        frequencies: as of `balanced_softmax`, [C].
    """
    return cross_entropy(logits + tau * frequencies.clamp_min(TINY).log().to(logits), labels)


def model_contrast(features: Tensor, towards: Tensor, away: Tensor, temperature: float) -> Tensor:
    """MOON's l_con, eq. (3): cross-entropy over the cosines to two other models' features of the same images.

    Args:
        features: z of the model that is trained, [B, D].
        towards: z_glob, of the global model, [B, D].
        away: z_prev, of the site's last model, [B, D].
        temperature: tau.
    """
    cosines = torch.stack([cosine_similarity(features, other, dim=1) for other in (towards, away)], dim=1)  # [B, 2]
    towards_first = torch.zeros(len(features), dtype=torch.int64, device=features.device)
    return cross_entropy(cosines / temperature, towards_first)


def soft_labels(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """FedPHP's KD: cross-entropy of a model's probabilities with another one's, softened, as targets (METHODS 5.13).

    Args:
        logits: of the model that is trained, [B, C]; not softened, as in the released code.
        taught: the other one's logits of the same images, [B, C], without gradient.
        temperature: T; `taught` is divided by it.
    """
    return cross_entropy(logits, (taught / temperature).softmax(dim=1))


def mean_discrepancy(features: Tensor, other_features: Tensor) -> Tensor:
    """FedPHP's MMD: squared maximum mean discrepancy of two batches of features, [B, D] each, by Gaussian kernels.

    Five kernels exp(-d^2 / s) are added up, with s = the mean d^2 of both batches' pairs, times 1/4, 1/2, 1, 2 and 4.
    No gradient flows through s.
    """
    both = torch.cat([features, other_features])  # [2B, D]
    # Without the matrix product that `cdist` may use: it cancels digits between near neighbours.
    squared = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist").square()  # [2B, 2B]
    mean = squared.detach().sum() / (len(both) * (len(both) - 1)) + SMALL
    kernels = torch.stack([torch.exp(-squared / (mean * 2.0**power)) for power in range(-2, 3)]).sum(dim=0)
    size = len(features)
    within = kernels[:size, :size] + kernels[size:, size:]  # [B, B]
    return (within - kernels[:size, size:] - kernels[size:, :size]).mean()


def prototypical_contrast(
    features: Tensor, labels: Tensor, centers: Tensor, known: Tensor, unit: bool = False
) -> Tensor:
    """FedProc's global prototypical contrast: cross-entropy over cosines without temperature (METHODS 4.1).

    Args:
        features: unit rows, [B, D].
        labels: [B].
        centers: the classes' global prototypes, [C, D], of any length: only their directions matter.
        known: which classes have a prototype, [C] bool. The others are no alternatives, and their examples count as
            nothing, though they stay in the mean.
        unit: the centers have unit length already, once for all steps.
    """
    unknown = ~known
    cosines = features @ (centers if unit else normalize(centers, dim=1)).T  # [B, C]
    logits = cosines.masked_fill(unknown, -torch.inf)  # its gradient is 0 there, even where no class is known
    targets = labels.masked_fill(unknown[labels], IGNORED)
    return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / len(labels)


def intra_class(features: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """FedPRP's eq. (10): mean squared difference to the class's global prototype, over batch and dimensions.

    Examples of a class without a prototype add nothing, but stay in the mean. [B, D], [B], [C, D], [C] bool -> [].
    """
    squared = (features - prototypes[labels]).square() * known[labels].unsqueeze(1)
    return squared.mean()


def inter_class(
    features: Tensor,
    labels: Tensor,
    centroids: Tensor,
    margins: Tensor,
    temperature: float,
    distance: Distance = "euclidean",
) -> Tensor:
    """FedPRP's eq. (9), the DRO loss of Samuel and Chechik (ICCV 2021): a softmax over the batch for each centroid.

    Args:
        features: z, [B, D].
        labels: [B].
        centroids: mu, [C, D]; only those of the batch's classes are used.
        margins: eps, [C], added to the distance from a centroid to the features of its own class.
        temperature: tau.
        distance: "negated-cosine" is the sign of the released FedPRP code, which drives features from their centroid.

    Returns:
        The mean over the batch's classes of the mean over each class's examples.
    """
    members = labels.unsqueeze(0) == torch.arange(len(centroids), device=labels.device).unsqueeze(1)  # [C, B]
    if len(centroids) > len(labels):  # a batch has as many classes as examples at most: theirs first, of a known number
        rows = (~members.any(dim=1)).int().argsort(stable=True)[: len(labels)]
        members, margins, centroids = (values.index_select(0, rows) for values in (members, margins, centroids))
    sizes = members.sum(dim=1)  # [C]
    distances = _distances(centroids, features, distance)  # [C, B]; C is now the batch size at most
    scores = torch.log_softmax(-(distances + margins.unsqueeze(1) * members) / temperature, dim=1)
    by_class = (scores * members).sum(dim=1) / sizes.clamp_min(1)  # [C]; 0 of a class that is not in the batch
    return -by_class.sum() / (sizes > 0).sum()


def _distances(centroids: Tensor, features: Tensor, distance: Distance) -> Tensor:
    """[C, D], [B, D] -> [C, B]."""
    if distance == "euclidean":
        # Not `torch.cdist`: the matrix product that it may use cancels digits between near neighbours.
        distances: Tensor = torch.linalg.vector_norm(centroids.unsqueeze(1) - features.unsqueeze(0), dim=2)
        return distances
    cosines = normalize(centroids, dim=1) @ normalize(features, dim=1).T
    return 1 - cosines if distance == "cosine" else cosines


def distillation(logits: Tensor, towards: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of softened predictions, in the batch's mean: without the factor T**2 (METHODS §5.14).

    Args:
        logits: of the model that is trained, [B, C].
        towards: of the teacher, [B, C].
        temperature: T.
    """
    student, teacher = (log_softmax(values / temperature, dim=1) for values in (logits, towards))
    return kl_div(student, teacher, reduction="batchmean", log_target=True)


BATCH = 512  # images whose mean loss is one summand
WORST = 1e6  # of a cross-entropy: a probability of e^-1000000


def compute_losses(local: FitContext, models: Iterable[Payload], examples: Examples) -> list[float]:
    """The plan's mean loss of each model over these examples, in evaluation mode and without augmentation.

    One that is larger than `WORST`, or no number, counts as `WORST`: such a model, of whoever it is, is never the best.
    `local.model` has the last one's numbers afterwards.

    Args:
        models: BODY and HEAD of `local.model`, as a server sent them.
        examples: of the site, at least one.

    Raises:
        CodecError, KeyError: as of `load`.
    """
    losses = []
    local.model.eval()
    for model in models:
        load(local.model.body, model[Part.BODY])
        load(local.model.head, model[Part.HEAD])
        total = torch.zeros((), dtype=torch.float64, device=local.data.device)
        with torch.no_grad():
            logits = local.data.computed(lambda images, _: local.model(images), examples, local.check)  # [N, C]
            labels = examples.labels.to(logits.device)
            for part, of_part in zip(torch.split(logits, BATCH), torch.split(labels, BATCH), strict=True):
                total += supervised(local, part, of_part) * len(of_part)
        loss = total.item() / len(examples)
        losses.append(loss if loss < WORST else WORST)  # NaN is not below
    return losses


def distance(local: FitContext, one: Payload, other: Payload) -> float:
    """||w - w'|| of two models over the parameters of `local.model`; buffers, such as running statistics, are none."""
    names = {Part.BODY: local.model.body.named_parameters(), Part.HEAD: local.model.head.named_parameters()}
    return distance_norm(
        {part: {name: one[part][name] for name, _ in parameters} for part, parameters in names.items()}, other
    )
