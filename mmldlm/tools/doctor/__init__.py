"""`mmldlm doctor`: find what would stop or slow a run before it starts."""
