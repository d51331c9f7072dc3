"""The fault loops: operation n of a rank goes wrong, for every n, and nothing that was promised is broken."""
