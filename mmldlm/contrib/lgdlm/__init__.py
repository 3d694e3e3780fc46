"""`mmldlm convert lgdlm`: data of the LGDLM trainer, for those who come from there."""
