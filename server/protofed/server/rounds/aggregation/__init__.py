"""A round's aggregation: which updates count, robust rules, the method's next state, its publication."""
