"""python -m scripts.proof.peers [--only TEXT] [--limit N] [--cuts N] [--write]: the table, printed or written to table.md."""
from scripts.proof.peers.table import main

main()
