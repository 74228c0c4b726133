"""The program of a ps or worker that only runs a TensorFlow server: `python -m tf4slurm.tensorflow.server_program`."""

from __future__ import annotations

from typing import NoReturn

import tensorflow  # noqa: F401 - here, so that it is preloaded

from tf4slurm.server_dictionary import current_server_dictionary
from tf4slurm.tensorflow.servers import run_server


def main() -> NoReturn:
    """Run the server of the task that TF_CONFIG names, until the agent ends this process."""
    run_server(current_server_dictionary(), None)


if __name__ == "__main__":
    main()
