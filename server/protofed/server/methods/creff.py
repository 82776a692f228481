"""CReFF: Shang et al., IJCAI 2022, Algorithm 1, server side (METHODS §5.11)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from protofed.server.method import (
    ONE_CLASS,
    Array,
    ClassRows,
    ContributorMeans,
    ExpectedUpdate,
    Mean,
    Method,
    Part,
    Payload,
    RoundContext,
    SiteId,
    SumForm,
    Sums,
    TensorSpec,
    Update,
    Weighting,
    like,
    server_methods,
    weigh,
)
from protofed.server.methods.federated_features import joined, matched, retrained

RETRAINED = "retrained"  # of HEAD: the global model's classifier in one matrix, beside FedAvg's
FEATURES, KNOWN = "features", "known"  # of PRIVATE: [C, n, D], and [C], 1 for a class that ever had a gradient


@server_methods.register(
    Method("creff", "CReFF", "Shang et al., IJCAI 2022", client_options=("min_samples_per_class",), tasks=ONE_CLASS)
)
@dataclass(frozen=True)
class CReFFServer:
    """FedAvg; beside it a classifier for its body, trained on features made of the sites' gradients by class."""

    global_model: ClassVar[bool] = True

    features: Annotated[int, Field(ge=1)] = 100  # federated features of each class
    match_epochs: Annotated[int, Field(ge=1)] = 100  # steps of the features a round
    match_lr: Annotated[float, Field(gt=0)] = 0.1
    crt_epochs: Annotated[int, Field(ge=1)] = 300  # over the features, of the classifier that is re-trained
    crt_lr: Annotated[float, Field(gt=0)] = 0.01
    weighting: Weighting = "uniform"  # p_k of FedAvg: 1/K, or n_k/n from sites that disclose n_k

    def init(self, model: Payload, context: RoundContext) -> Payload:
        """The first head is both classifiers; features from N(0, 1)."""
        head = model[Part.HEAD]
        rng, weight = np.random.default_rng(context.seed), head["weight"]
        features = rng.standard_normal((context.classes, self.features, weight.shape[1])).astype(weight.dtype)
        private = {FEATURES: features, KNOWN: np.zeros(context.classes, weight.dtype)}
        return {**model, Part.HEAD: {**head, RETRAINED: joined(head)}, Part.PRIVATE: private}

    def broadcast(self, state: Payload, site: SiteId) -> Payload:
        """Body and both classifiers; the features are private."""
        return state

    def expects(self, state: Payload) -> ExpectedUpdate:
        """FedAvg's model; a gradient [C, E] for each class that the site holds."""
        matrix = state[Part.HEAD][RETRAINED]
        rows = [TensorSpec(Part.CLASS_GRADIENTS, str(c), matrix.dtype.name, matrix.shape) for c in range(len(matrix))]
        model = tuple(spec for spec in like(state, Part.BODY, Part.HEAD) if spec.name != RETRAINED)
        return ExpectedUpdate(model, tuple(rows), weight=self.weighting == "examples")

    def aggregate(self, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        """A class that nobody holds keeps its features."""
        mean, gradients = Mean((Part.BODY, Part.HEAD)), ContributorMeans()
        for update in updates:
            mean.add(update.payload, weigh(update, self.weighting))
            gradients.add(update.payload.get(Part.CLASS_GRADIENTS, {}))
        return self._with_classifier(state, mean.result(), gradients.result())

    def sum_form(self) -> SumForm:
        """The whole model, and gradients by class."""
        rows = ClassRows(Part.CLASS_GRADIENTS, (Part.HEAD, RETRAINED), whole=True)
        return SumForm((Part.BODY, Part.HEAD), self.weighting, rows)

    def from_sums(self, state: Payload, sums: Sums, context: RoundContext) -> Payload:
        """As `aggregate`."""
        return self._with_classifier(state, sums.averaged(state), sums.row_means())

    def _with_classifier(self, state: Payload, model: Payload, gradients: dict[str, Array]) -> Payload:
        """The next state: a class that never had a gradient has FedAvg's row in the re-trained classifier."""
        private, head = state[Part.PRIVATE], model[Part.HEAD]
        features, known = private[FEATURES].copy(), private[KNOWN].copy()
        if classes := sorted(map(int, gradients)):
            wanted = np.stack([gradients[str(c)] for c in classes])
            of_round = features[classes], np.array(classes), state[Part.HEAD][RETRAINED], wanted
            features[classes] = matched(*of_round, self.match_epochs, self.match_lr)
            known[classes] = 1
        classifier = joined(head).copy()
        if (present := known > 0).sum() > 1:  # of one class alone nothing could be learnt
            classifier[present] = retrained(features[present], self.crt_epochs, self.crt_lr, bias="bias" in head)
        new_head = {**head, RETRAINED: classifier}
        return {**model, Part.HEAD: new_head, Part.PRIVATE: {FEATURES: features, KNOWN: known}}
