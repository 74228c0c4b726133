"""Functions that a running script may call, and the connection of the script to its agent."""
