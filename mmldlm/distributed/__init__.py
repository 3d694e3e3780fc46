"""The only importers of accelerate, deepspeed and torch.distributed."""
