"""Tables, progress bars and child processes of terminal commands."""
