"""Modules for the script's Python, which may be 3.6 or newer and need not have tf4slurm.

Agents append this directory to PYTHONPATH of the script, so each file is a module at the top level there.
"""
