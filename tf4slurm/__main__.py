"""`python -m tf4slurm` is the command `tf4slurm`."""

from tf4slurm.cli.main import main

if __name__ == "__main__":
    main()
