"""How ranks agree: rounds on a store, and who is who. No payload ever travels here, and nothing is unpickled."""
