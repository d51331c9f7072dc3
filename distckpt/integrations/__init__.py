"""One module for each framework that owns the training loop or the saving; each imports its framework when it is imported."""
