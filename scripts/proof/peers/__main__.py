"""python -m scripts.proof.peers [--only TEXT] [--states N] [--cuts N] [--images N] [--write]: the table, printed or written."""
from scripts.proof.peers.table import main

main()
