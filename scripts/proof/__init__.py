"""The proof: every layer of RELIABILITY 3.3 behind one command (scripts/prove)."""
