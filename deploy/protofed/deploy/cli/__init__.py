"""The `protofed` command line, one file for each group of commands."""

from protofed.common.grpc_environment import require_tls_1_3

require_tls_1_3()  # here, because the commands' modules import gRPC, which reads it once, when it is imported
