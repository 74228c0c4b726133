"""The control plane: messages <- auth, munge, verdict <- state <- service, client."""
