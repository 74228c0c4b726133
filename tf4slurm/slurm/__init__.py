"""Slurm: allocation and step of a process, layout of a step, GPUs, nodelists, and Slurm's programs."""
