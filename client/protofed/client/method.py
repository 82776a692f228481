"""The client half of a method, in PyTorch: its protocol, and all that its author imports from protofed.

A client algorithm is a frozen dataclass with the members of `ClientMethod`. Its fields are the options that a recipe
may set. protofed's own methods import nothing else of protofed, and what is exported here stays. `protofed new method
NAME` writes a package with a method of your own; `protofed.common.plugins` says how a recipe names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias, cast

from protofed.client.models.calibration import CalibratedEnsemble
from protofed.client.models.split import (
    ComparedBy,
    CosineHead,
    MethodHead,
    PrototypeHead,
    SplitModel,
    dump,
    held,
    load,
    load_joined,
    mixed,
    mixture,
    site_models,
)
from protofed.client.training.context import FitContext, FitStart
from protofed.client.training.cores import Cores
from protofed.client.training.loop import (
    Loss,
    Step,
    Trained,
    Weigher,
    class_gradients,
    class_means,
    frequent,
    frozen,
    named,
    remembered,
    stacked,
    train,
    train_head,
)
from protofed.client.training.losses import (
    Distance,
    balanced_softmax,
    class_shares,
    compute_losses,
    distance,
    distillation,
    distribution_gap,
    inter_class,
    intra_class,
    mean_discrepancy,
    model_contrast,
    prototypical_contrast,
    proximal,
    soft_labels,
    supervised,
)
from protofed.client.training.noisy_steps import label_shares
from protofed.client.training.progress import ParameterGroup, sgd_length
from protofed.common.config.recipe import DpCost, LocalLoss, Plan
from protofed.common.errors import ConfigError, FailureReason, TaskFailedError
from protofed.common.payload import Array, Exchange, Part, Payload, SiteId, Tensors, Update, towards, weights
from protofed.common.plugins import ONE_CLASS, Registry, TaskNames
from protofed.common.secure_aggregation.linear_form import ClassRows, SumForm, Weighting

__all__ = [
    "ONE_CLASS",
    "Array",
    "CalibratedEnsemble",
    "ClassRows",
    "ClientMethod",
    "ComparedBy",
    "ComparingMethod",
    "ConfigError",
    "Cores",
    "CosineHead",
    "Declaration",
    "Distance",
    "DpCost",
    "Exchange",
    "FailureReason",
    "FitContext",
    "FitStart",
    "LocalLoss",
    "Loss",
    "MethodHead",
    "ParameterGroup",
    "Part",
    "Payload",
    "Personal",
    "Plan",
    "PrivateMethod",
    "PrototypeHead",
    "RefiningClientMethod",
    "SiteId",
    "SplitModel",
    "Step",
    "SumForm",
    "SummableClientMethod",
    "TaskFailedError",
    "Tensors",
    "Trained",
    "Update",
    "Weigher",
    "Weighting",
    "balanced_softmax",
    "class_gradients",
    "class_means",
    "class_shares",
    "client_methods",
    "compute_losses",
    "distance",
    "distillation",
    "distribution_gap",
    "dump",
    "frequent",
    "frozen",
    "held",
    "inter_class",
    "intra_class",
    "label_shares",
    "load",
    "load_joined",
    "mean_discrepancy",
    "mixed",
    "mixture",
    "model_contrast",
    "named",
    "prototypical_contrast",
    "proximal",
    "remembered",
    "sgd_length",
    "site_models",
    "soft_labels",
    "stacked",
    "supervised",
    "towards",
    "train",
    "train_head",
    "weights",
]

# The model that a site itself predicts with: as its last fit left it, or as `load_global` makes it of the last
# broadcast and the site's state.
Personal: TypeAlias = Literal["trained", "loaded"]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a method does beyond its updates; all of it is said, so that nothing is allowed by a forgotten word.

    Attributes:
        personal: the model that a site itself predicts with.
        global_model: whether there is a model of all sites, as the server algorithm says: `load_global` without a
            memory makes it.
        mixes_classes: it mixes class models by the site's label shares: of others a site takes no class models.
            Scores of such a mixture tell the shares, even in an aggregate over three sites, so no aggregate has them.
        exchanges: what it moves between single sites: each of them must allow it.
        own_losses: losses of class logits that it trains by whatever `plan.loss` says: the policy must allow them.
        tasks: those that it is defined for, by name. "any": it knows targets only through `supervised`.
    """

    personal: Personal
    global_model: bool
    mixes_classes: bool
    exchanges: frozenset[Exchange]
    own_losses: frozenset[LocalLoss]
    tasks: TaskNames


class ClientMethod(Protocol):
    """The client half of a method."""

    declares: ClassVar[Declaration]

    @property
    def sends(self) -> frozenset[Part]:
        """The parts that its updates may have; a site whose policy does not allow all of them refuses the run."""

    def load_global(self, local: FitContext, received: Payload) -> None:
        """Load the received model into `local.model`, whatever that was before; called before a fit and to score.

        Evaluators have no state: for them it is the global model, if the method has one.

        Args:
            received: tensors of any shapes by part, which may be read-only; a server sent them, so nothing about them
                is certain.

        Raises:
            CodecError, KeyError: tensors are missing, or have other names or shapes than the model's.
        """

    def fit(self, local: FitContext, received: Payload) -> Update:
        """Train on the site's examples, starting from what was received; called once in each round.

        Returns:
            `local.update(...)` of the parts in `sends`; `local.model` is the site's own model afterwards.

        Raises:
            TaskFailedError: the site cannot do the task.
        """


class ComparingMethod(ClientMethod, Protocol):
    """A client half that compares features with prototypes elsewhere than in its head, as in its loss: for figures."""

    compared_by: ClassVar[ComparedBy]


class SummableClientMethod(ClientMethod, Protocol):
    """A client algorithm whose updates can be aggregated securely: runs may have `federation.secure = true`."""

    def sum_form(self) -> SumForm:
        """What of an update is aggregated, as the server algorithm says it.

        Raises:
            ConfigError: nothing, with these options; the text says why.
        """


class PrivateMethod(ClientMethod, Protocol):
    """A client half that works with `[plan.dp]`: all that leaves follows from the noisy results of the verbs here.

    Its losses are means over examples, and use the model's parameters through its modules only; what depends on no
    example is a `regularizer`. Of the site's data it reads nothing but by `train`, `class_means` and `label_shares`.
    """

    def dp_cost(self, plan: Plan) -> DpCost:
        """The noisy mechanisms of a round; a fit that makes more fails.

        Raises:
            ConfigError: not with these options; the text says which.
        """


class RefiningClientMethod(ClientMethod, Protocol):
    """A client half of a method whose aggregates an evaluator refines, as the server half says."""

    def refine(self, local: FitContext, received: Payload) -> Update:
        """Make of a round's aggregate what the round publishes; called at an evaluator, once in each round.

        Args:
            local: its `data.train` are the evaluator's auxiliary images, and it has no state.
            received: what the server half's `to_refine` gives.

        Returns:
            `local.update(...)` of what the server half's `expects_refined` says.
        """


def refining(half: ClientMethod) -> RefiningClientMethod | None:
    """The half, if it refines models."""
    return cast("RefiningClientMethod", half) if hasattr(half, "refine") else None


def compute_dp_cost(half: ClientMethod, name: str, plan: Plan) -> DpCost:
    """The noisy mechanisms of a round of a method.

    Args:
        name: the method's, in recipes.

    Raises:
        ConfigError: it has none, or not with these options; or it releases class sums, for which the plan has no noise.
    """
    if not hasattr(half, "dp_cost"):
        having = ", ".join(other for other in client_methods if hasattr(client_methods.get(other), "dp_cost"))
        raise ConfigError(
            f"method '{name}' sends values without noise: [plan.dp] is for {having}, and for methods of your own "
            "with dp_cost"
        )
    cost = cast("PrivateMethod", half).dp_cost(plan)
    if cost.class_releases and plan.dp is not None and plan.dp.class_noise_multiplier is None:
        raise ConfigError(
            f"method '{name}' releases class sums: set plan.dp.class_noise_multiplier, the std of their noise"
        )
    if plan.dp is not None and plan.dp.shared_by is not None and not cost.linear:
        raise ConfigError(
            f"method '{name}' uses a site's images for more than one step, and shared noise (plan.dp.shared_by) "
            "does not hide this. Remove shared_by, or choose a method that sends the model and keeps nothing "
            "(fedavg)"
        )
    return cost


client_methods: Registry[ClientMethod] = Registry(
    "method",
    half="client",
    home="protofed.client.methods",
    protocols=(
        ClientMethod,
        ComparingMethod,
        SummableClientMethod,
        PrivateMethod,
        RefiningClientMethod,
    ),
)
