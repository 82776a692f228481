"""The client halves of the tasks that come with protofed; `protofed.common.tasks` has the others."""
