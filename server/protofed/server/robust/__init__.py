"""Robust aggregation: pure functions between a round's updates and a method's `aggregate`."""
