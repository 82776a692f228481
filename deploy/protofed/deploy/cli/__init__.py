"""The `protofed` command line, one file for each group of commands."""

from protofed.common.process import require_tls_1_3

# Before any command's module is imported: some import gRPC, which reads this environment variable once, at import.
require_tls_1_3()
