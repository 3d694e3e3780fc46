"""`mmldlm convert lgdlm`: import data of the LGDLM trainer, the predecessor of mmldlm."""
