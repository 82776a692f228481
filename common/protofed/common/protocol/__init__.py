"""What both ends say: tasks, receipts, telemetry and their protobuf form."""
