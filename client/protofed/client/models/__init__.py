"""Models as body and head: the catalogue, heads, and their numbers as parts of a payload."""
