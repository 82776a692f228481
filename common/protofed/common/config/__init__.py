"""What people write: recipes and settings, as models that refuse an unknown key by name."""
