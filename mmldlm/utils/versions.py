"""Check of the installed versions against the ranges in the metadata of mmldlm; imports none of the packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from mmldlm.errors import ConfigError


def check_versions() -> None:
    """Raise `ConfigError` if a package is too old, which would otherwise end in a traceback, or in other numbers."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in requires("mmldlm") or ()]
    except (ImportError, PackageNotFoundError):  # bundles need fewer packages; a checkout that is not installed
        return
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:  # bundles need fewer packages than training
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            needed = f"{requirement.name}{requirement.specifier}"
            raise ConfigError(
                f"{requirement.name}: found version {found}, expected {requirement.specifier}; pip install '{needed}'"
            )
