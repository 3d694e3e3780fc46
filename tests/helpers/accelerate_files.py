"""Accelerate configs as its questionnaire writes them, and the environments in which its launcher starts ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from accelerate.commands import launch
from accelerate.commands.config import config
from accelerate.commands.menu import BulletMenu

ONE_GPU, MULTI_CPU, MULTI_GPU = 0, 1, 4  # "Which type of machine are you using?"
# Answers of `accelerate config` by a part of the question; every other one gets its default.
QUESTIONNAIRES: dict[str, dict[str, Any]] = {
    "config_one_gpu": {"type of machine": ONE_GPU},
    "config_multi_cpu": {"type of machine": MULTI_CPU, "How many processes": "2"},
    "config_multi_gpu": {"type of machine": MULTI_GPU, "How many GPU": "2"},
    "config_multi_gpu_bf16": {"type of machine": MULTI_GPU, "How many GPU": "2", "mixed precision": 2},
    "config_fsdp2": {"type of machine": MULTI_GPU, "use FullySharded": "yes", "How many GPU": "2"},
    "config_fsdp2_bf16": {
        "type of machine": MULTI_GPU,
        "use FullySharded": "yes",
        "How many GPU": "2",
        "layer class names": "LlamaDecoderLayer",
        "mixed precision": 2,
    },
    "config_fsdp1": {"type of machine": MULTI_GPU, "use FullySharded": "yes", "How many GPU": "2", "FSDP version": 0},
    "config_dynamo": {"type of machine": MULTI_GPU, "How many GPU": "2", "torch dynamo": "yes"},
}


def answer_questionnaire(answers: Mapping[str, Any], path: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the file of `accelerate config` with these answers, and the defaults of the installed version."""

    def answer(question: str, default: Any) -> Any:
        return next((value for part, value in answers.items() if part in question), default)

    patch.setattr("builtins.input", lambda question="": answer(question, ""))
    patch.setattr(BulletMenu, "run", lambda menu, default_choice=0: answer(menu.prompt, default_choice))
    config.get_user_input().to_yaml_file(path)


def launched_environments(
    file: Path, options: Sequence[str], processes: int, patch: pytest.MonkeyPatch
) -> list[dict[str, str]]:
    """Return the environment of each rank that `accelerate launch --config_file FILE` would start.

    Its launcher runs as it is, but for the last call, which would start processes.
    """
    environments: list[dict[str, str]] = []

    def torchrun(_: Any) -> None:
        place = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for rank in map(str, range(processes)):
            environments.append({**os.environ, **place, **master, "RANK": rank, "LOCAL_RANK": rank})

    def one_process(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        environments.append(env)
        return real_popen(["true"])

    real_popen = subprocess.Popen
    with patch.context() as scope:
        scope.setattr(torch.distributed.run, "run", torchrun)
        scope.setattr(launch.subprocess, "Popen", one_process)
        arguments = ["--config_file", str(file), *options, "-m", "mmldlm.train"]
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    return environments
