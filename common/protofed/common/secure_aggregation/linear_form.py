"""A method's linear form: what of an update is aggregated, and where each number stands in a site's vector.

The client and server algorithms of a method name the same form, so that site and server agree on the vector without a
word about it.

`FixedPoint` brings numbers to integers of the ring modulo 2**64, whose sums are exact and do not depend on order.
`Sums` is what a server computes from an opened sum: means, class rows and mixtures, never what one site sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from protofed.common.errors import ConfigError, SecureAggregationError, StateError
from protofed.common.payload import Array, Part, Payload, Tensors, TensorSpec, Update, dtype_name
from protofed.common.protocol.messages import MAX_SECURE_SITES

WORD_BITS = 64
_BLOCK = 1 << 15  # numbers: temporaries of the vector's size would be new pages, ten times the arithmetic's time


@dataclass(frozen=True)
class FixedPoint:
    """A number x is round(x * 2**bits); its magnitude is at most `limit`, which keeps every sum within the ring.

    Attributes:
        limit: largest magnitude of a number of one site.
        bits: of the fraction.
        most: sites of one sum.

    Raises:
        ConfigError: a sum of so many such numbers could overflow.
    """

    limit: float
    bits: int
    most: int

    def __post_init__(self) -> None:
        needed = math.log2(self.limit) + self.bits + math.log2(self.most) + 1  # and the sign
        if needed > WORD_BITS or self.most * round(math.ldexp(self.limit, self.bits)) >= 2 ** (WORD_BITS - 1):
            raise ConfigError(
                f"an aggregate over {self.most} sites of numbers up to {self.limit:g} with {self.bits} bits of a "
                f"fraction needs {needed:.1f} bits; expected at most {WORD_BITS}. Lower the limit or the number of "
                "bits"
            )

    def encoded(self, numbers: Array) -> Array:
        """Floats of any shape as uint64 of that shape, clipped to the limit.

        Who refused a number beyond it would tell the server, which chooses the limit, one bit of one site.

        Raises:
            SecureAggregationError: a number is none.
        """
        wide = np.asarray(numbers, dtype=np.float64)
        if math.isnan(float(np.min(wide, initial=0.0))):
            raise SecureAggregationError(
                "no-number", "an aggregate takes numbers only, and one value is not a number (NaN)"
            )
        flat, words, scaled = wide.reshape(-1), np.empty(wide.size, dtype=np.int64), np.empty(_BLOCK)
        for begin in range(0, len(flat), _BLOCK):
            piece = flat[begin : begin + _BLOCK]
            block = np.clip(piece, -self.limit, self.limit, out=scaled[: len(piece)])
            np.multiply(block, 2.0**self.bits, out=block)  # exact
            words[begin : begin + _BLOCK] = np.rint(block, out=block)
        return words.view(np.uint64).reshape(wide.shape)

    def decoded(self, total: Array) -> Array:
        """A sum as float64."""
        return np.multiply(total.view(np.int64), 2.0**-self.bits, dtype=np.float64)


# Of every run: a server that could make it coarse, or the limit low, would have each site add a threshold of what it
# learnt, which adding up does not hide. A step is below float32's own of all numbers from 2^-16 on.
POINT = FixedPoint(limit=65536.0, bits=40, most=MAX_SECURE_SITES)


Weighting: TypeAlias = Literal["uniform", "examples"]  # p_k: 1/K, or n_k/n from sites that disclose n_k
EXAMPLES = 2.0**20  # that weigh 1 in a sum: fewer weigh less, so that weighted numbers stay within the fixed point
WEIGHT, ROWS, CONTRIBUTORS, MASS = "weight", "rows", "contributors", "mass"  # keys of a layout
MEAN, MIXTURE = "mean/", "mixture/"  # how its other keys begin, before a tensor's path


@dataclass(frozen=True)
class ClassRows:
    """Rows by class, [D] each, or [C, D]: a site sends the rows that it has.

    Attributes:
        part: of the update, in which a row has its class's number as a name.
        like: part and name of a tensor [C, D] that every site is sent: it says how many classes there are, and D.
        whole: each row is as large as all of `like`, [C, D].
    """

    part: Part
    like: tuple[Part, str]
    whole: bool = False


@dataclass(frozen=True)
class SumForm:
    """The sums from which a method makes its next state; integer tensors (BatchNorm's counters) are in none.

    Rows and mixtures are by class: if too few sites hold a class, nothing of it is aggregated.

    Attributes:
        means: parts x, whose sums are w x and w; w = 1, or n_k / 2**20.
        rows: class rows: the sums are 1_c row_c, [C, D] or [C, C, D], and 1_c [C].
        mixtures: parts x, whose sums are w p_c x [C, ...] and w p_c [C].
        shares: the part whose one tensor [C] is p; of CLASS_PRESENCE p_c is 0 or 1.
    """

    means: tuple[Part, ...] = ()
    weighting: Weighting = "uniform"
    rows: ClassRows | None = None
    mixtures: tuple[Part, ...] = ()
    shares: Part | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.mixtures:
            raise ValueError("a linear form has class rows or mixtures, not both: a site has one flag for each class")
        if bool(self.mixtures) != (self.shares is not None):
            raise ValueError("mixtures need the part with their shares, and nothing else does")

    @property
    def by_class(self) -> bool:
        """Whether something is aggregated by class: sites count each class's contributors before they send numbers."""
        return self.rows is not None or self.shares is not None


def read_form(half: object, method: str) -> SumForm:
    """The linear form of a method's half.

    Raises:
        ConfigError: it has none, or not with these options; the text has the reason.
    """
    sum_form: Any = getattr(half, "sum_form", None)
    if sum_form is None:
        raise ConfigError(
            f"method {method} has no linear form, so federation.secure = true cannot hide its updates in an "
            "aggregate. Choose another method, or remove federation.secure"
        )
    form: SumForm = sum_form()
    return form


class Field(NamedTuple):
    """A tensor of sums: its key in the layout, its shape, and the dtype of what is computed from it."""

    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SumLayout:
    """Where each sum stands in a vector of N numbers; equal for all that have the form and were sent the same model.

    Attributes:
        fields: in the order of their keys, one behind the other.
        classes: C, of flags and rows; 0: there are none.
    """

    form: SumForm
    fields: tuple[Field, ...]
    classes: int

    @classmethod
    def of(cls, form: SumForm, tensors: Iterable[TensorSpec], sent: Payload) -> SumLayout:
        """The layout of updates that have these tensors.

        Args:
            tensors: those that all updates of the run have, in any order; rows of classes may be among them.
            sent: what all sites were sent.

        Raises:
            SecureAggregationError: the model or the update lacks what the form needs.
        """
        specs = sorted(tensors, key=lambda spec: spec.path)
        floats = [spec for spec in specs if np.dtype(spec.dtype).kind == "f"]
        fields = [Field(f"{MEAN}{spec.path}", spec.shape, spec.dtype) for spec in floats if spec.part in form.means]
        if fields:
            fields.append(Field(WEIGHT, (), "float64"))
        classes = 0
        if form.rows is not None:
            matrix = _matrix(sent, *form.rows.like)
            classes = len(matrix)
            shape = (classes, *matrix.shape) if form.rows.whole else matrix.shape
            fields += [Field(ROWS, shape, dtype_name(matrix.dtype)), Field(CONTRIBUTORS, (classes,), "float64")]
        if form.shares is not None:
            classes = _shared_classes(specs, form.shares)
            mixed = [spec for spec in floats if spec.part in form.mixtures]
            fields += [Field(f"{MIXTURE}{spec.path}", (classes, *spec.shape), spec.dtype) for spec in mixed]
            fields.append(Field(MASS, (classes,), "float64"))
        return cls(form, tuple(sorted(fields)), classes)

    @cached_property
    def size(self) -> int:
        """N, numbers of a vector."""
        return sum(math.prod(field.shape) for field in self.fields)

    def named(self, vector: Array) -> dict[str, Array]:
        """The tensors of a vector [N] of any dtype, by key, as views of it."""
        tensors, at = {}, 0
        for field in self.fields:
            end = at + math.prod(field.shape)
            tensors[field.key] = vector[at:end].reshape(field.shape)
            at = end
        return tensors

    def flags(self, update: Update) -> Array:
        """Which classes a site holds, [C] uint64 of 0 and 1.

        Raises:
            SecureAggregationError: the update is not of this layout.
        """
        flags = np.zeros(self.classes, dtype=np.uint64)
        if self.form.rows is not None:
            flags[[int(c) for c in self._rows(update)]] = 1
        elif self.form.shares is not None:
            flags[self._shares(update) > 0] = 1
        return flags

    def numbers(self, update: Update, classes: Array | None = None) -> Array:
        """A site's terms of all sums, [N] float64.

        Args:
            classes: [C] bool, the classes that enough sites hold: of the others nothing is in the vector. None: all.

        Raises:
            SecureAggregationError: the update is not of this layout, or has no example count to weigh it by.
        """
        vector = np.zeros(self.size)
        terms, weight = self.named(vector), self._weight(update)
        classes = np.ones(self.classes, dtype=bool) if classes is None else classes
        if WEIGHT in terms:
            terms[WEIGHT][...] = weight
        for key, term in terms.items():
            if key.startswith(MEAN):
                np.multiply(_tensor(update, key, term.shape), weight, out=term, dtype=np.float64)
        if self.form.rows is not None:
            for name, row in self._rows(update).items():
                if classes[int(name)]:
                    terms[ROWS][int(name)], terms[CONTRIBUTORS][int(name)] = row, 1.0
        if self.form.shares is not None:
            terms[MASS][...] = np.where(classes, weight * self._shares(update), 0.0)
            for key, term in terms.items():
                if key.startswith(MIXTURE):
                    by_class = terms[MASS].reshape(-1, *(1,) * (term.ndim - 1))
                    np.multiply(by_class, _tensor(update, key, term.shape[1:]), out=term, dtype=np.float64)
        return vector

    def clipped(self, update: Update, limit: float) -> list[str]:
        """The keys of sums into which an update's numbers go clipped to the limit.

        Raises:
            SecureAggregationError: as `numbers`, or a number is none.
        """
        keys = []
        for key, term in self.named(self.numbers(update)).items():
            largest = max(-float(np.min(term, initial=0.0)), float(np.max(term, initial=0.0)))
            if math.isnan(largest):
                raise SecureAggregationError(
                    "no-number", f"{key} is no number: training diverges; try a smaller plan.lr"
                )
            if largest > limit:
                keys.append(key)
        return keys

    def words(self, update: Update, fixed_point: FixedPoint, classes: Array | None = None) -> Array:
        """`numbers` as words of the ring, [N] uint64.

        Raises:
            SecureAggregationError: as `numbers`, or a number is none.
        """
        return fixed_point.encoded(self.numbers(update, classes))

    def _weight(self, update: Update) -> float:
        if self.form.weighting == "uniform":
            return 1.0
        if update.weight is None:
            raise SecureAggregationError("no-count", "this run weighs by example counts, and the update has no count")
        return update.weight / EXAMPLES

    def _rows(self, update: Update) -> Tensors:
        assert self.form.rows is not None  # noqa: S101  (asked for forms with rows)
        rows = update.payload.get(self.form.rows.part, {})
        shape = next(field.shape for field in self.fields if field.key == ROWS)
        for name, row in rows.items():
            if not name.isdecimal() or int(name) >= self.classes or row.shape != shape[1:]:
                raise SecureAggregationError(
                    "other-form", f"{self.form.rows.part}/{name} is no row of this run's classes"
                )
        return rows

    def _shares(self, update: Update) -> Array:
        assert self.form.shares is not None  # noqa: S101  (asked for forms with shares)
        shares = list(update.payload.get(self.form.shares, {}).values())
        if len(shares) != 1 or shares[0].shape != (self.classes,):
            raise SecureAggregationError("other-form", f"{self.form.shares} is not one share of each class")
        return shares[0].astype(np.float64)


def _tensor(update: Update, key: str, shape: tuple[int, ...]) -> Array:
    _, part, name = key.split("/", 2)
    array = update.payload.get(Part(part), {}).get(name)
    if array is None or array.shape != shape:
        raise SecureAggregationError("other-form", f"{part}/{name} does not fit the layout of this run's aggregate")
    return array


def _shared_classes(specs: Iterable[TensorSpec], part: Part) -> int:
    """C of the part's one tensor [C]; SecureAggregationError: it is none, or not alone."""
    shapes = [spec.shape for spec in specs if spec.part is part]
    if len(shapes) != 1 or len(shapes[0]) != 1:
        raise SecureAggregationError("other-form", f"{part} {shapes}: expected one tensor [C]")
    return shapes[0][0]


def _matrix(sent: Payload, part: Part, name: str) -> Array:
    matrix = sent.get(part, {}).get(name)
    if matrix is None or matrix.ndim != 2:
        raise SecureAggregationError(
            "other-form", f"the model has no {part}/{name} [C, D], which gives the layout of the rows"
        )
    return matrix


@dataclass(frozen=True)
class Sums:
    """The sums of one round.

    Attributes:
        numbers: [N] float64, in the order of the layout.
    """

    layout: SumLayout
    numbers: Array

    @classmethod
    def opened(cls, layout: SumLayout, total: Array, fixed_point: FixedPoint) -> Sums:
        """Those of a total [N] uint64."""
        return cls(layout, fixed_point.decoded(total))

    @property
    def weight(self) -> float:
        """What the weights of all means add up to; with uniform weights, the number of aggregated sites."""
        return float(self._tensors.get(WEIGHT, np.zeros(())))

    def mean(self, part: Part) -> dict[str, Array]:
        """The (weighted) mean of a part's tensors, each of its own shape and dtype; integer ones are not there.

        Raises:
            StateError: nothing was aggregated, or all weights were zero.
        """
        if not (weight := self.weight) > 0:
            raise StateError("a secure aggregation of no updates: its weights add up to nothing")
        return {name: (total / weight).astype(dtype) for name, total, dtype in self._of(f"{MEAN}{part}/")}

    def averaged(self, state: Payload) -> dict[Part, Tensors]:
        """All parts that have means, with the state's own integer tensors (BatchNorm's counters)."""
        return {part: {**state[part], **self.mean(part)} for part in self.layout.form.means if part in state}

    def row_means(self) -> dict[str, Array]:
        """The mean row, [D] or [C, D], over contributors by class; classes that nobody has, or too few, are absent."""
        contributors, rows = self._tensors[CONTRIBUTORS], self._tensors[ROWS]
        dtype = next(field.dtype for field in self.layout.fields if field.key == ROWS)
        return {str(c): (rows[c] / contributors[c]).astype(dtype) for c in np.flatnonzero(contributors > 0)}

    def mixture_mass(self) -> Array:
        """What the sites' shares of each class add up to, [C] float64; 0: nobody holds it, or too few."""
        return self._tensors[MASS]

    def mixtures(self, part: Part) -> dict[str, Array]:
        """The mean of a part's tensors by the sites' shares of each class, [C, ...]; zeros for a class without mass."""
        mass = self.mixture_mass()
        divisor = np.where(mass > 0, mass, 1.0)
        return {
            name: (total / divisor.reshape(-1, *(1,) * (total.ndim - 1))).astype(dtype)
            for name, total, dtype in self._of(f"{MIXTURE}{part}/")
        }

    @cached_property
    def _tensors(self) -> dict[str, Array]:
        return self.layout.named(self.numbers)

    def _of(self, prefix: str) -> list[tuple[str, Array, str]]:
        """Name, sum and dtype of the tensors whose keys begin like this."""
        fields = [field for field in self.layout.fields if field.key.startswith(prefix)]
        return [(field.key.removeprefix(prefix), self._tensors[field.key], field.dtype) for field in fields]
