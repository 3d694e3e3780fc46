"""The network: `MMDiT` and what it is made of."""
