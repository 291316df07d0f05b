"""A run that is ended, by a time limit or a person, takes down what its tests have started."""

import signal

signal.signal(signal.SIGTERM, signal.default_int_handler)
