"""What is saved, behind one protocol: ``write(files, ranks)`` and ``load(checkpoint, ranks)``."""
