"""`mmldlm doctor`: what would stop a run, or slow it, found before it starts."""
