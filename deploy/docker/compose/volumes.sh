#!/bin/sh
# Makes the volumes for keys, ledger and states of compose.yaml, or of the compose file that is named; once more is no harm.
# Compose refuses to start without them, and no `down -v` removes them. To be called in the folder of the compose file.
set -eu
file="${1:-compose.yaml}"
if [ ! -f "$file" ]; then
    echo "volumes: no $file here; expected to be called in the folder that has it" >&2
    exit 1
fi
project="${COMPOSE_PROJECT_NAME:-$(sed -n 's/^COMPOSE_PROJECT_NAME=//p' .env 2>/dev/null | tail -1)}"
for name in $(sed -n 's/^  \([a-z0-9-]*\): {external: true, .*/\1/p' "$file"); do
    docker volume create "${project:-protofed}_$name" >/dev/null
done
