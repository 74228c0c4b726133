"""tf4slurm runs TensorFlow parameter-server jobs on Slurm, from the first process to the last exit.

Importing it does nothing: no tensorflow, no grpc, no environment, no handler.
"""

import logging

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())
