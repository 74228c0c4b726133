"""The control plane: messages <- auth, munge, outcome <- state <- service, client."""
