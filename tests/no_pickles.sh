#!/usr/bin/env bash
# Nothing that was received or stored is ever executed: no pickle, torch.load, yaml.load, eval or allow_pickle.
set -euo pipefail
cd "$(dirname "$0")/.."
pattern='(^|[^A-Za-z_.])(pickle|cloudpickle|dill|joblib)\b|torch\.load\(|yaml\.(unsafe_)?load\(|allow_pickle=True|(^|[^A-Za-z_.])(eval|exec)\('
if git grep -nE "$pattern" -- 'common/*.py' 'server/*.py' 'client/*.py' 'deploy/*.py' 'protos/*.py' 'tests/*.py'; then
  echo "the lines above load or run what could be anybody's; use protofed.common.codec" >&2
  exit 1
fi
