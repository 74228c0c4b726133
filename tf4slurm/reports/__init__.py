"""How a job that was, or is, is shown to a person: timeline, curves, advice."""
