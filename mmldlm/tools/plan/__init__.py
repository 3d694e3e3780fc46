"""`mmldlm plan`: which engine, micro-batch and activation checkpointing to take, by predicted memory and time."""
