"""What an operator asks of a server over gRPC, and the live view of a run."""

from protofed.common.grpc_environment import require_tls_1_3

require_tls_1_3()  # before a module of this package imports gRPC, for programs that are not the command line
