"""The old names of tf4slurm for a Python that lacks tf4slurm: ServerDictionary and DistributedTFQueueHook.

`tf4slurm client` puts this package on the search path. If this Python has tf4slurm itself, that is imported instead.
"""

import importlib
import os
import sys


def _find_whole_tf4slurm() -> bool:
    """Import a tf4slurm from elsewhere on the search path, in place of this package. Return whether there is one."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    this, path = sys.modules.pop(__name__), list(sys.path)
    sys.path[:] = [each for each in path if os.path.abspath(each) != here]
    try:
        importlib.import_module(__name__)
        return True
    except ImportError:  # there is none, or it needs a newer Python
        sys.modules[__name__] = this
        sys.path[:] = path
        return False


if not _find_whole_tf4slurm():
    from tf4slurm_client import barrier, get_server_dictionary, on_stop, report, should_stop, signal_done

    __all__ = ["barrier", "get_server_dictionary", "on_stop", "report", "should_stop", "signal_done"]
