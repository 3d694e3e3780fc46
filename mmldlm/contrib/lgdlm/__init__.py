"""`mmldlm convert lgdlm`: data and run configs of the LGDLM trainer, for those who come from there."""
