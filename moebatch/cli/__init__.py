"""What the person sees: the only part that talks to a person."""
