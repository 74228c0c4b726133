"""How a ps learns that training is over, in scripts that start their own servers."""

from tf4slurm.shutdown.method import Ending
from tf4slurm.shutdown.ps import serve_until_done, wait_for_workers
from tf4slurm.shutdown.worker import done_at_end, signal_at_exit, signal_done

__all__ = ["Ending", "done_at_end", "serve_until_done", "signal_at_exit", "signal_done", "wait_for_workers"]
