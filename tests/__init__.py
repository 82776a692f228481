"""The tests; whatever of them imports gRPC, this comes first."""

from protofed.common.grpc_environment import require_tls_1_3

require_tls_1_3()
