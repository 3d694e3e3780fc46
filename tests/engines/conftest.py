from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_runs import PARITY

from mmldlm import train


@pytest.fixture(scope="session")
def parity_config(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    path = folder / "config.yaml"
    path.write_text(PARITY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, parity_config: Path) -> Callable[..., Path]:
    """The run folder of one process with these settings; trained once."""
    made: dict[tuple[str, ...], Path] = {}

    def reference(*settings: str) -> Path:
        if settings not in made:
            folder = tmp_path_factory.mktemp("single")
            assert train.main([str(parity_config), f"run.dir={folder}", *settings]) == 0
            made[settings] = folder
        return made[settings]

    return reference
