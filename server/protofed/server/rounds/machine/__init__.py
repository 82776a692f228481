"""The round as a pure state machine: its phases, events and effects, its rules, what it waits for, where it resumes."""
