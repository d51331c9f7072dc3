"""How a job is started and told to stop."""

from distckpt.launch.signals import ignore_stop_signals as ignore_stop_signals
