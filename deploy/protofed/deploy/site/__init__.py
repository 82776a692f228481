"""What a hospital asks before and while it takes part: checks of its data, and what a run would send."""
