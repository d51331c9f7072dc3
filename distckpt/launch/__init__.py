"""How a job is started, told to stop, and started again. No torch."""

from distckpt.launch.ending import finish as finish
from distckpt.launch.environment import Launch as Launch
from distckpt.launch.environment import detect as detect
from distckpt.launch.signals import ignore_stop_signals as ignore_stop_signals
