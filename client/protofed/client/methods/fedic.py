"""FEDIC: Shang et al., ICME 2022, calibrated distillation on a balanced auxiliary set (METHODS §5.14)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from protofed.client.method import (
    ONE_CLASS,
    CalibratedEnsemble,
    Declaration,
    Exchange,
    FitContext,
    ParameterGroup,
    Part,
    Payload,
    Update,
    Weighting,
    client_methods,
    distillation,
    dump,
    load,
    site_models,
    supervised,
    train,
)


@client_methods.register("fedic")
@dataclass(frozen=True)
class FEDICClient:
    """Sites train as in FedAvg; an evaluator distils their ensemble, calibrated on public images, into the mean."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset({Exchange.SHARE}),  # with the evaluator
        own_losses=frozenset(),
        tasks=ONE_CLASS,
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    weighting: Weighting = "uniform"  # p_k: 1/K, or n_k/n from sites that disclose n_k
    steps: Annotated[int, Field(ge=1)] = 100  # of each of the evaluator's three trainings, rounded up to whole epochs
    refine_lr: Annotated[float, Field(gt=0)] = 1e-3  # of their Adam
    refine_decay: Annotated[float, Field(ge=0)] = 2e-4  # of all weights
    distilled: Annotated[float, Field(ge=0, le=1)] = 0.5  # lambda: share of the distillation in the last one's loss
    temperature: Annotated[float, Field(gt=0)] = 2.0  # T

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """FedAvg's ClientUpdate."""
        self.load_global(local, received)
        trained = train(local, lambda x, y: supervised(local, local.model(x), y))
        return local.update({Part.BODY: dump(local.model.body), Part.HEAD: dump(local.model.head)}, loss=trained.loss)

    def refine(self, local: FitContext, received: Payload) -> Update:
        """Fine-tune the mean; train the calibration of the sites' ensemble; distil that into the mean."""
        adam = partial(
            ParameterGroup, lr=self.refine_lr, weight_decay=self.refine_decay, max_grad_norm=inf, optimizer="adam"
        )
        model, epochs = local.model, ceil(self.steps / local.plan.steps_per_epoch(len(local.data.train)))
        self.load_global(local, received)
        train(local, lambda x, y: cross_entropy(model(x), y), [adam(model.parameters())], epochs)
        tuned = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        teacher = CalibratedEnsemble(model, site_models(received), tuned)
        train(local, lambda x, y: cross_entropy(teacher(x), y), [adam(teacher.parameters())], epochs)
        self.load_global(local, received)

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            logits = model(images)
            with torch.no_grad():
                towards = teacher(images)
            teacher_loss = distillation(logits, towards, self.temperature)
            return self.distilled * teacher_loss + (1 - self.distilled) * cross_entropy(logits, labels)

        trained = train(local, objective, [adam(model.parameters())], epochs)
        return local.update({Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, loss=trained.loss)
