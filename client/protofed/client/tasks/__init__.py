"""The client halves of the tasks that come with protofed; `protofed.common.config.tasks` has the others."""
