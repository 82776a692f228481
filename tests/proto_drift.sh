#!/usr/bin/env bash
# The committed messages are those that the .proto files give.
set -euo pipefail
cd "$(dirname "$0")/.."
before=$(cat protos/protofed/protos/v1/*_pb2*.py* | sha256sum)
make --silent protos 2>/dev/null
if [ "$before" != "$(cat protos/protofed/protos/v1/*_pb2*.py* | sha256sum)" ]; then
  echo "the generated messages were not those of the .proto files; commit what 'make protos' wrote" >&2
  exit 1
fi
