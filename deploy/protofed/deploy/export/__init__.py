"""A run's models as files for use elsewhere, and predictions made with them."""
