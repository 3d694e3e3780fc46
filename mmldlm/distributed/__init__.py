"""Ranks, engines and optimizers: the only importers of accelerate, deepspeed and torch.distributed."""
