"""Run the command `tf4slurm` as `python -m tf4slurm`."""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # the user's directory: a json.py in it would take the place of Python's own
    from tf4slurm.cli.main import main

    main()
