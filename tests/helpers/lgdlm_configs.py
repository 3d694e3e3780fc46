"""Run configs with the keys of LGDLM's YAML files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_MODEL = """
model:
  type: multimodal_mmdit
  diffusion_process: mdlm
  latent_diffusion_process: continuous
  hidden_size: 1024
  n_blocks: {blocks}
  n_heads: {blocks}
  cond_dim: 1024
  max_seq_len: 1024
  dropout: 0.1
  num_residual_streams: 2
  qk_rmsnorm: true
  use_multimodal: true
  latent_dim: 1024
  latent_beta_min: 0.0001
  latent_beta_max: 0.02
  cluster_size: 0
  p_uniform: 0.0
  t_eps: 1e-4
"""
_REST = """
logging:
  run_name: "{name}-run"
  wandb_project: any
  wandb_entity: null
  wandb_dir: ./outputs/
  log_freq: 100
  eval_freq: 1000
  save_freq: 5000
  num_eval_batches: 50
  save_dir: ./outputs
optimizer:
  name: adamw
  lr: 1e-4
  weight_decay: 0.01
  beta1: 0.9
  beta2: 0.95
  eps: 1e-8
  grad_clip_norm: 1.0
"""
_LOSS = """
loss:
  loss_type: {loss_type}
  loss_scale: 1.0
  reduction: tokenmean
  latent_loss_weight: 1.0
  text_loss_weight: 1.0
"""
_DEFAULTS = "defaults:\n  - logging: default\n  - optimizer: adam\n  - _self_\n"
_JSON_DATA = """
data:
  dataset_name: json
  latent_data_root: old/e5
  data_files:
    train: "${{data.latent_data_root}}/train_data.json"
    validation: "${{data.latent_data_root}}/train_data.json"
  num_workers: 4
  max_length: 512
  tokenizer_name: bert-base-uncased
"""
_TRAINING = """
training:
  train_batch_size: 16
  eval_batch_size: 16
  dtype: {dtype}
  compile_model: false
  lr_schedule: cosine
  warmup_steps: 5000
  resume: null
  world_size: 1
"""
_FIXED_STEPS = _TRAINING + "  seed: 42\n  num_train_steps: 250000\n"
_WITHOUT_MODE = _DEFAULTS + _JSON_DATA + _MODEL + _FIXED_STEPS + _LOSS + _REST
_PREPROCESSED_DATA = """
data:
  token_dir: old/sonar/tokens/train
  latent_dir: old/sonar/latents/train
  data_dir: old/sonar
  data_files:
    train: train_data_with_tokens.json
    validation: train_data_with_tokens.json
  load_tokens: true
  max_samples: null
  max_val_samples: 1000
  num_workers: 8
  tokenizer_path: old/bert-base-uncased
  cache_dir: old/cache
  local_files_only: true
  use_preprocessed: true
  val_ratio: 0.05
"""
_TEMPLATES = {
    "mmdit": _DEFAULTS
    + _JSON_DATA
    + "  sequential_schedule:\n    - {{type: unconditional, epochs: 20}}\n    - {{type: mixed, epochs: 20}}\n"
    + _MODEL
    + _TRAINING
    + "  num_epochs: 50\n  loss_type: l2t\n  save_every_n_steps: 5000\n"
    + _LOSS
    + _REST
    + "tokenizer:\n  name: bert-base-uncased\n  cache_dir: old/cache\n  local_files_only: true\n",
    "mmdit_1024d": _WITHOUT_MODE,
    "mmdit_e5": _WITHOUT_MODE,
    "mmdit_preprocessed": _DEFAULTS
    + _PREPROCESSED_DATA
    + _MODEL
    + "  latent_timesteps: 1000\n  latent_beta_schedule: cosine\n  latent_parameterization: epsilon\n"
    + _FIXED_STEPS
    + "  num_epochs: 10\n  total_steps: ${{training.num_epochs}} * 2\n  save_every_n_steps: 5000\n"
    + "  gradient_accumulation_steps: 1\n  sequential_schedule:\n    - {{type: unconditional, steps: 5000}}\n"
    + "    - {{type: l2t, steps: 10000}}\n    - {{type: t2l, steps: 10000}}\n"
    + _LOSS
    + "  use_cross_entropy: true\n  text_kl_weight: 0.0\n"
    + _REST
    + "  use_fused: true\ntokenizer:\n  path: old/bert-base-uncased\n  cache_dir: old/cache\n  local_files_only: true\n"
    + "  add_mask_token: true\nhydra:\n  run: {{dir: 'out/${{logging.run_name}}'}}\n  sweep: {{dir: out, subdir: .}}\n",
}
NAMES = tuple(_TEMPLATES)


def write_configs(folder: Path, groups: Iterable[str] = ("logging", "optimizer")) -> Path:
    """Write the four files, and of the files that their `defaults` name those of `groups`."""
    folder.mkdir(parents=True)
    for name, template in _TEMPLATES.items():
        blocks, loss_type = (12, "multimodal_mdlm") if name in ("mmdit_1024d", "mmdit_e5") else (24, "multimodal_mdlm")
        if name == "mmdit_preprocessed":
            loss_type = "l2t"
        text = template.format(name=name, blocks=blocks, loss_type=loss_type, dtype="bf16" if blocks == 24 else "fp32")
        (folder / f"{name}.yaml").write_text(text)
    contents = {
        "logging/default.yaml": "run_name: null\nnum_eval_batches: 196\nlog_freq: 10\nsave_dir: checkpoints\n",
        "optimizer/adam.yaml": "type: adam\nlr: 5e-4\nbetas: [0.9, 0.99]\neps: 1e-9\nweight_decay: 0.02\n",
    }
    for path, content in contents.items():
        if path.split("/")[0] in groups:
            (folder / path).parent.mkdir()
            (folder / path).write_text(content)
    return folder
