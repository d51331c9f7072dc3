"""How a job is started and told to stop."""
