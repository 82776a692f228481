"""SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1 with option II, client side (METHODS §5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor, from_numpy

from protofed.client.method import (
    Declaration,
    FitContext,
    Part,
    Payload,
    Step,
    SumForm,
    Update,
    client_methods,
    dump,
    load,
    sgd_length,
    supervised,
    train,
    weights,
)


@client_methods.register(scaffold=("server_lr",))
@dataclass(frozen=True)
class ScaffoldClient:
    """FedAvg whose sites correct each gradient by how the site's gradients differ from those of all sites: c - c_i."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD, Part.CONTROL})

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the global model."""
        load(local.model.body, received[Part.BODY])
        load(local.model.head, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        """J steps from y = x by g - c_i + c; then c_i+ = c_i - c + (x - y) / (J eta), the mean g.

        With momentum J is the length of its steps. Adam, whose steps are no sums of gradients, is corrected after each,
        and g is its step.
        """
        self.load_global(local, received)
        c, model, plan = received[Part.CONTROL], local.model, local.plan
        c_i = local.client_state.get(Part.CONTROL) or {path: np.zeros_like(array) for path, array in c.items()}
        y, sgd = model.state_dict(keep_vars=True), plan.optimizer == "sgd"
        drift = {path: from_numpy(np.asarray(c[path] - c_i[path])).to(y[path]) for path in c}

        def objective(images: Tensor, labels: Tensor) -> Tensor:  # [B, channels, H, W], [B] -> []
            loss = supervised(local, model(images), labels)
            for path in c if sgd else ():
                loss = loss + ((y[path] - y[path].detach()) * drift[path]).sum()  # 0, and its gradient c - c_i
            return loss

        def correct(_: Step) -> None:
            for path in () if sgd else c:
                y[path].sub_(local.lr * drift[path])

        trained = train(local, objective, after=correct)
        sent = {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}
        length = local.lr * sgd_length(trained.steps, plan.momentum if sgd else 0.0)
        start, end = weights(received), weights(sent)
        corrected = {path: np.asarray((start[path] - end[path]) / length) for path in c}
        local.client_state[Part.CONTROL] = {path: np.asarray(c_i[path] - c[path] + corrected[path]) for path in c}
        # The mean g - c_i + c is c + (c_i+ - c_i): the server takes c off, as it takes x off y.
        return local.update({**sent, Part.CONTROL: corrected}, loss=trained.loss)

    def sum_form(self) -> SumForm:
        """The whole model, and the control variates."""
        return SumForm((Part.BODY, Part.HEAD, Part.CONTROL))
