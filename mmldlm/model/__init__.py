"""The network: `MMDiT` and its building blocks."""
