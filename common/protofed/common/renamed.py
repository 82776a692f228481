"""Former names of keys, from before 0.2.0: the error for an old file names the new key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RENAMED: Final[Mapping[str, str]] = {  # former path -> new name, in the same table
    "vocabulary": "class_names",
    "plan.batch": "batch_size",
    "plan.decay": "lr_decay",
    "plan.clip": "max_grad_norm",
    "plan.augment": "augmentation",
    "federation.rate": "participation",
    "federation.must_include": "required_sites",
    "federation.idle_s": "stall_timeout_s",
    "federation.attempts": "max_attempts",
    "federation.patience_s": "site_wait_timeout_s",
    "federation.max_norm": "max_update_norm",
    "federation.personal_every": "score_personal_every",
    "evaluation.groups": "frequency_groups",
    "evaluation.order": "class_order",
    "data.labels": "label_map",
    "data.ignore": "ignore_labels",
    "data.unreadable": "max_unreadable_fraction",
    "data.group": "group_pattern",
    "data.preparation": "preprocessing_digest",
    "data.test_share": "test_fraction",
    "data.local_test_share": "local_test_fraction",
    "data.merge": "merge_test_into_train",
    "method.smoothing": "prototype_momentum",
    "method.ema": "prototype_momentum",  # the share of the old prototypes, 1 - ema
    "method.separation": "prototype_init",
    "share": "partition_index",
    "models": "plugins",  # of a policy
}
