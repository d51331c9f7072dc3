"""Adapters that plug into a framework's own loop; each is imported by its user only."""
