"""One save by many ranks: rank files, the transaction of two rounds, the commit."""
