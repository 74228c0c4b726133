"""What a running script may call, and its connection to its agent."""
