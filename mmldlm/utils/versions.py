"""The packages that mmldlm's metadata names, and their installed versions. This imports none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from mmldlm.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def check_versions(extra: str = "") -> None:
    """Raise `ConfigError` if a package is too old. Otherwise it would end in a traceback, or change numbers."""
    for problem in outdated(_requirements(extra)):
        raise ConfigError(problem)


def outdated(requirements: Iterable[Requirement]) -> Iterator[str]:
    """Yield a line for each package whose installed version is out of range."""
    for requirement in requirements:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:  # a bundle needs fewer packages than training
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            yield f"{requirement.name}: found version {found}, expected {requirement.specifier}; pip install '{needed}'"


def install_command(extra: str) -> str:
    """Return a command that installs the packages of an extra, whether mmldlm is a checkout or a wheel.

    Without mmldlm's metadata, which names the packages, return a phrase that names the extra.
    """
    always, packages = {*map(str, _requirements(""))}, list[str]()
    for requirement in _requirements(extra):
        if str(requirement) not in always:
            packages.append(f"'{requirement.name}{requirement.specifier}'")
    return f"pip install {' '.join(packages)}" if packages else f"install the extra {extra!r}"


def _requirements(extra: str) -> list[Requirement]:
    """Return the requirements of mmldlm with an extra, or nothing if its metadata is missing."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in requires("mmldlm") or ()]
    except (ImportError, PackageNotFoundError):  # a bundle without these packages, or a checkout that is not installed
        return []
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
