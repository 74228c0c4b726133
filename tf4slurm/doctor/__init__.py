"""What could keep a job from running here, found before it does, with what to do about each."""
