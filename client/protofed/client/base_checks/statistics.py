"""Whether a model that the server sends is one that an honest run could have: pure checks of its tensors.

A server that chooses the weights freely can choose weights whose gradients are the site's images. Examples are rows
that all measure the same thing beside sorted thresholds (Fowl et al., "Robbing the Fed", ICLR 2022), and rows that each
respond to a single image (Boenisch et al., "When the Curious Abandon Honesty", EuroS&P 2023). Such weights are far from
what training makes. Bounds stand beside the largest value of honest runs: all digits and spiral recipes, every site and
round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from protofed.common.payload import Array, Part, Payload, Tensors, is_buffer

# Between platforms the same seed gives the same numbers, but for the last digits of a few functions (log, sqrt of a
# vectorised library, an SVD): 1e-4 of a tensor's norm is far above these, and far below one step of training.
TOLERANCE = 1e-4
MAX_GROWTH = 10.0  # a layer's norm beside that of the built model's; honest: 4.9 (spiral), 2.3 (digits)
MIN_NORM = 1e-3  # likewise, below which a layer counts as dead
MAX_ROW_RATIO = 100.0  # the largest row's norm beside the median row's; honest: 10.4 (the head of cwfedavg)
MAX_ZERO_ROWS = 0.5  # share of a layer's rows; honest: 0
SAME_DIRECTION = 0.999  # cosine above which two rows count as one; honest rows of 8 and more entries: below 0.99
MAX_DUPLICATES = 0.25  # share of a layer's rows that have such a twin, above the built model's share; honest: 0
# Of a linear layer of the body none may: a few units of one direction, with sorted thresholds, give as many images
# away. Noise of their own hides that they are twins only where it drowns the images. Honest rows: below 0.64.
SAME_DIRECTION_LINEAR, MAX_DUPLICATES_LINEAR = 0.9, 0.0
RANK_ONE = 1e-3  # everything but the first singular value, beside it; honest: above 0.3
MIN_SIDE = 4  # rows and columns below which rank, duplicates and ratios of rows say nothing
MIN_COLUMNS = 8  # for duplicates: in few dimensions honest rows have neighbours, too
MIN_VARIANCE = 1e-10  # of BatchNorm, below which a channel counts as dead
FLOOR = 1e-3  # least norm of a layer that a movement is compared with, as a share of its part's norm
# How much more a part other than the body may move: a head starts small, and a mixture of class models becomes another
# one. Honest, in a round: body 0.61 (its layers 0.87, spiral 1.47), head 1.4, class models 2.6, prototypes 0.83.
SLACK_OF_HEADS = 4.0
MAX_SCALAR = 100.0  # of a number that a method puts in place of the head, such as a logit scale
MAX_ROWS, SKETCH = 1024, 512  # rows and columns of a layer that the search for twins compares
_MATRICES = (Part.BODY, Part.HEAD)


class BaseCheck(StrEnum):
    """What a model was refused for."""

    FIRST_MODEL = "first-model"
    CHANGE = "change"
    FINITE = "finite"
    DEAD = "dead"
    GROWTH = "growth"
    ROWS = "rows"
    DUPLICATES = "duplicates"
    RANK = "rank"
    VARIANCE = "variance"
    RESPONSE = "response"


@dataclass(frozen=True)
class BaseProblem:
    """Why a model is refused.

    Attributes:
        layer: `part/name` of the first layer or tensor that fails.
        text: what is wrong with it, with the number and its bound.
    """

    check: BaseCheck
    layer: str
    text: str


@dataclass(frozen=True)
class Matrix:
    """A weight [out, ...] seen as rows [out, in].

    Attributes:
        zero_rows: share of rows that are zero.
        row_ratio: the largest row's norm over the median's; infinite if the median is zero.
        duplicates: share of the rows that point where another one does, either way.
        off_rank: norm of what the best matrix of rank one leaves, over that matrix's norm.
    """

    zero_rows: float
    row_ratio: float
    duplicates: float
    off_rank: float


@dataclass(frozen=True)
class BaseStatistics:
    """Of a model all that the checks of its structure compare.

    Attributes:
        squares: by tensor, its shape and the sum of its squares; without buffers.
        matrices: by tensor, for weights of two and more dimensions.
    """

    squares: Mapping[str, tuple[tuple[int, ...], float]]
    matrices: Mapping[str, Matrix]


def statistics(model: Payload) -> BaseStatistics:
    """Of the parts body and head; what is not finite must have been refused before."""
    squares: dict[str, tuple[tuple[int, ...], float]] = {}
    matrices: dict[str, Matrix] = {}
    for path, array in _weights(model, _MATRICES):
        squares[path] = array.shape, _square(array)
        if array.ndim >= 2 and array.size:
            matrices[path] = _matrix(array)
    return BaseStatistics(squares, matrices)


def first_problem(base: Payload, built: Payload, options: Mapping[str, object]) -> BaseProblem | None:
    """Whether the model of round 1 is the model that this site built itself from the recipe's seed.

    What a method's server algorithm puts in its place is checked as far as it is known. Class models, and another head
    in one matrix, are copies of the built head. Prototypes are no longer than unit vectors. A number is the option of
    that name in the recipe.

    Args:
        built: BODY and HEAD.
        options: of the recipe's method.
    """
    for path, expected in _pairs(base, built):
        part, _, name = path.partition("/")
        array = base[Part(part)][name]
        if array.shape != expected.shape or not _equal(array, expected):
            return BaseProblem(
                BaseCheck.FIRST_MODEL,
                path,
                "differs from what this site builds from the recipe's seed. Either the server sends weights of its "
                "own, or it made the first model with another version of PyTorch",
            )
    for name in sorted(set(built[Part.BODY]) - set(base.get(Part.BODY, {}))):
        return BaseProblem(BaseCheck.FIRST_MODEL, f"{Part.BODY}/{name}", "is missing")
    return _class_models_problem(base, built) or _head_problem(base, built, options) or _prototypes_problem(base)


def finite_problem(base: Payload) -> BaseProblem | None:
    """Whether every number is finite."""
    for part in sorted(base):
        for name, array in sorted(base[part].items()):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return BaseProblem(BaseCheck.FINITE, f"{part}/{name}", "has values that are not finite")
    return None


def structure_problem(base: Payload, built: BaseStatistics) -> BaseProblem | None:
    """Whether a model of finite numbers has layers that training does not make from the built model.

    A property that the built model has itself, such as a layer of zeros, is no problem.
    """
    of_base = statistics(base)
    return (
        _variance_problem(base)
        or _norm_problem(of_base, built)
        or next(_matrix_problems(of_base, built), None)
        or _class_models_norm_problem(base, built)
    )


def change_problem(base: Payload, last: Payload, bound: float) -> BaseProblem | None:
    """Whether a model is too far from the model that the site saw last: by part, and of the body by layer, too.

    Args:
        bound: the most movement, as a share of the last one's norm.
    """
    for part in sorted(base):
        moved, norm = _movement(base, last, part)
        most = bound if part is Part.BODY else SLACK_OF_HEADS * bound
        if not sum(moved.values()) <= (most * math.sqrt(sum(norm.values()))) ** 2:
            share = math.sqrt(sum(moved.values()) / (sum(norm.values()) or math.inf))
            return BaseProblem(BaseCheck.CHANGE, str(part), _moved_text(share, most))
        floor = FLOOR * math.sqrt(sum(norm.values()))
        for layer in moved if part is Part.BODY else ():
            share = math.sqrt(moved[layer]) / max(math.sqrt(norm[layer]), floor)
            if not share <= most:
                return BaseProblem(BaseCheck.CHANGE, f"{part}/{layer}", _moved_text(share, most))
    return None


def _moved_text(share: float, most: float) -> str:
    return f"has moved by {share:.3g} of its norm since this site last saw it: expected at most {most:.3g}"


def _movement(base: Payload, last: Payload, part: Part) -> tuple[dict[str, float], dict[str, float]]:
    """By layer, the squares of how far it has moved and of its last norm, over tensors that both models have."""
    moved: dict[str, float] = {}
    norm: dict[str, float] = {}
    for path, array in _weights(base, (part,)):
        name = path.partition("/")[2]
        before = last.get(part, {}).get(name)
        if before is not None and before.shape == array.shape:
            layer = name.rpartition(".")[0]
            moved[layer] = moved.get(layer, 0.0) + _square(array.astype(np.float64) - before)
            norm[layer] = norm.get(layer, 0.0) + _square(before)
    return moved, norm


def _weights(model: Payload, parts: Iterable[Part]) -> Iterator[tuple[str, Array]]:
    """`part/name` and tensor of all weights, in a fixed order."""
    for part in parts:
        for name in sorted(model.get(part, {})):
            array = model[part][name]
            if array.dtype.kind == "f" and not is_buffer(name):
                yield f"{part}/{name}", array


def _pairs(base: Payload, built: Payload) -> Iterator[tuple[str, Array]]:
    """`part/name` of what both have, with the built tensor."""
    for part in _MATRICES:
        for name in sorted(set(base.get(part, {})) & set(built[part])):
            yield f"{part}/{name}", built[part][name]


def _equal(array: Array, expected: Array) -> bool:
    if array.dtype != expected.dtype:
        return False
    difference = array.astype(np.float64) - expected
    return _square(difference) <= TOLERANCE**2 * _square(expected)


def _class_models_problem(base: Payload, built: Payload) -> BaseProblem | None:
    for name, stack in sorted(base.get(Part.CLASS_MODELS, {}).items()):
        head = built[Part.HEAD].get(name)
        if head is not None and not (stack.shape[1:] == head.shape and all(_equal(one, head) for one in stack)):
            text = "are not copies of the head that this site builds from the recipe's seed"
            return BaseProblem(BaseCheck.FIRST_MODEL, f"{Part.CLASS_MODELS}/{name}", text)
    return None


def _head_problem(base: Payload, built: Payload, options: Mapping[str, object]) -> BaseProblem | None:
    joined = _joined(built[Part.HEAD])
    for name in sorted(set(base.get(Part.HEAD, {})) - set(built[Part.HEAD])):
        array, option = base[Part.HEAD][name], options.get(name)
        if joined is not None and array.shape == joined.shape and not _equal(array, joined):
            text = "is not the head that this site builds from the recipe's seed, in one matrix"
            return BaseProblem(BaseCheck.FIRST_MODEL, f"{Part.HEAD}/{name}", text)
        if array.size == 1 and array.dtype.kind == "f":
            value = float(array.reshape(()))
            if isinstance(option, int | float):
                holds, expected = math.isclose(value, option, rel_tol=TOLERANCE), f"{option:g}"
            else:
                holds, expected = abs(value) <= MAX_SCALAR, f"at most {MAX_SCALAR:g}"
            if not holds:
                text = f"is {value:.6g}: expected {expected}"
                return BaseProblem(BaseCheck.FIRST_MODEL, f"{Part.HEAD}/{name}", text)
    return None


def _joined(head: Tensors) -> Array | None:
    """A linear head in one matrix, [C, D], or [C, D + 1] with the bias as the last column; None of any other head."""
    if head.keys() == {"weight", "bias"}:
        return np.column_stack([head["weight"], head["bias"]])
    return head["weight"] if head.keys() == {"weight"} else None


def _prototypes_problem(base: Payload) -> BaseProblem | None:
    for name, rows in sorted(base.get(Part.PROTOTYPES, {}).items()):
        longest = float(np.linalg.norm(rows.reshape(-1, rows.shape[-1]).astype(np.float64), axis=1).max())
        if not longest <= 1 + TOLERANCE:
            text = f"have a row of norm {longest:.6g}: expected at most 1 before the first round"
            return BaseProblem(BaseCheck.FIRST_MODEL, f"{Part.PROTOTYPES}/{name}", text)
    return None


def _variance_problem(base: Payload) -> BaseProblem | None:
    for name, array in sorted(base.get(Part.BODY, {}).items()):
        if name.rpartition(".")[2] == "running_var" and array.size:
            dead = float(np.mean(array < MIN_VARIANCE))
            if array.min() < 0 or dead > MAX_ZERO_ROWS:
                text = (
                    f"has a variance of {array.min():.3g}, and {dead:.0%} of its variances are below {MIN_VARIANCE:g}"
                )
                return BaseProblem(BaseCheck.VARIANCE, f"{Part.BODY}/{name}", text)
    return None


def _norm_problem(base: BaseStatistics, built: BaseStatistics) -> BaseProblem | None:
    """Norms of whole layers: a bias alone starts near zero."""
    now: dict[str, float] = {}
    first: dict[str, float] = {}
    for path, (shape, square) in base.squares.items():
        if path in built.squares and built.squares[path][0] == shape:
            part, _, name = path.partition("/")
            layer = f"{part}/{name.rpartition('.')[0]}".rstrip("/")
            now[layer] = now.get(layer, 0.0) + square
            first[layer] = first.get(layer, 0.0) + built.squares[path][1]
    for layer, square in now.items():
        if first[layer]:
            ratio = math.sqrt(square / first[layer])
            if not ratio <= MAX_GROWTH:
                text = f"is {ratio:.3g} times its norm before the first round: expected at most {MAX_GROWTH:g}"
                return BaseProblem(BaseCheck.GROWTH, layer, text)
    return None


def _matrix_problems(base: BaseStatistics, built: BaseStatistics) -> Iterator[BaseProblem]:
    for path, now in base.matrices.items():
        first = built.matrices.get(path, Matrix(0.0, 1.0, 0.0, math.inf))
        _, square = built.squares.get(path, ((), 0.0))
        if base.squares[path][1] < MIN_NORM**2 * square:
            yield BaseProblem(
                BaseCheck.DEAD, path, f"has less than {MIN_NORM:g} of the norm that it had before the first round"
            )
        if now.zero_rows > MAX_ZERO_ROWS + first.zero_rows:
            yield BaseProblem(BaseCheck.DEAD, path, f"has {now.zero_rows:.0%} rows of zeros")
        if not now.row_ratio <= max(MAX_ROW_RATIO, first.row_ratio):
            text = f"has a row of {now.row_ratio:.3g} times the median row's norm: expected {MAX_ROW_RATIO:g} at most"
            yield BaseProblem(BaseCheck.ROWS, path, text)
        most = MAX_DUPLICATES_LINEAR if len(base.squares[path][0]) == 2 else MAX_DUPLICATES
        if path.startswith(Part.BODY) and now.duplicates > most + first.duplicates:
            yield BaseProblem(
                BaseCheck.DUPLICATES,
                path,
                f"has rows that equal another row, or its negative: {now.duplicates:.0%} of all",
            )
        if now.off_rank < RANK_ONE <= first.off_rank:
            yield BaseProblem(
                BaseCheck.RANK, path, f"has nearly rank one: all but {now.off_rank:.2g} of its norm is in one direction"
            )


def _class_models_norm_problem(base: Payload, built: BaseStatistics) -> BaseProblem | None:
    for name, stack in sorted(base.get(Part.CLASS_MODELS, {}).items()):
        shape, square = built.squares.get(f"{Part.HEAD}/{name}", ((), 0.0))
        weights = sum(value for path, (_, value) in built.squares.items() if path.startswith(f"{Part.HEAD}/"))
        if square and stack.shape[1:] == shape and len(stack):
            ratio = math.sqrt(max(_square(one) for one in stack) / weights)
            if not ratio <= MAX_GROWTH:
                text = f"is {ratio:.3g} times the first head's norm: expected at most {MAX_GROWTH:g}"
                return BaseProblem(BaseCheck.GROWTH, f"{Part.CLASS_MODELS}/{name}", text)
    return None


def _matrix(array: Array) -> Matrix:
    rows = array.reshape(len(array), -1).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)
    zero = float(np.mean(norms == 0))
    if min(rows.shape) < MIN_SIDE or not norms.any():
        return Matrix(zero, 1.0, 0.0, math.inf)
    median = float(np.median(norms))
    ratio = float(norms.max()) / median if median else math.inf
    same = SAME_DIRECTION_LINEAR if array.ndim == 2 else SAME_DIRECTION
    return Matrix(zero, ratio, _duplicates(rows[norms > 0], same), _off_rank(rows))


def _duplicates(rows: Array, same: float) -> float:
    """Share of rows [out, in], none of them zero, that have a twin; among `MAX_ROWS` of them, evenly chosen.

    Many columns are first folded into `SKETCH` with random signs (a count sketch). Equal rows stay equal, and the
    cosine of others changes by about 1 / sqrt(SKETCH).

    Args:
        same: cosine above which two rows are twins, either way.
    """
    if len(rows) < 2 or rows.shape[1] < MIN_COLUMNS:
        return 0.0
    chosen = rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_ROWS)).astype(int)]
    if (columns := chosen.shape[1]) > SKETCH:
        draw = np.random.default_rng(columns)
        signed = chosen * draw.choice((-1.0, 1.0), columns)
        folded = -(-columns // SKETCH) * SKETCH
        order = draw.permutation(folded)
        padded = np.zeros((len(chosen), folded))
        padded[:, :columns] = signed
        chosen = padded[:, order].reshape(len(chosen), -1, SKETCH).sum(axis=1)
    unit = chosen / np.maximum(np.linalg.norm(chosen, axis=1, keepdims=True), 1e-300)
    cosines = np.abs(unit @ unit.T)
    np.fill_diagonal(cosines, 0.0)
    return float(np.mean(cosines.max(axis=1) > same))


def _off_rank(rows: Array) -> float:
    """What is left of [out, in] beside its best matrix of rank one, by three steps of the power method.

    For a matrix near rank one they converge; for any other they leave more, which only says so the louder.
    """
    right = rows[int(np.argmax(np.einsum("ij,ij->i", rows, rows)))]
    first = 0.0
    for _ in range(3):
        left = rows @ (right / (np.linalg.norm(right) or 1.0))
        right = rows.T @ (left / (np.linalg.norm(left) or 1.0))
        first = float(np.linalg.norm(right))
    residual = max(float(np.einsum("ij,ij->", rows, rows)) - first**2, 0.0)
    return math.sqrt(residual) / first if first else math.inf


def _square(array: Array) -> float:
    flat = array.reshape(-1).astype(np.float64)
    return float(flat @ flat)
