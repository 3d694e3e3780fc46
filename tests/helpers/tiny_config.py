"""A run config that trains in seconds."""

TINY = """
run: {{dir: {run}, seed: 3}}
data: {{path: {store}}}
model: {{depth: 2, width: 32, num_heads: 2, conditioning_width: 32, modulation_rank: 8}}
optim: {{lr: 3e-3}}
train: {{steps: 8, global_batch_size: 8}}
log: {{every: 1, tensorboard: false}}
validation: {{every: 4, first: 0, samples: 16, text_samples: 2}}
checkpoint: {{every_steps: 4, keep_best: 0}}
sampling: {{steps: 4}}
"""
