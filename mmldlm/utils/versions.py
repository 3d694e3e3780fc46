"""The packages that mmldlm needs, by its own metadata, and which of them are installed; imports none of them."""

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


def install_command(extra: str) -> str:
    """Return a command that installs the packages of an extra of mmldlm, which itself may be a checkout or a wheel."""
    from packaging.requirements import Requirement

    needed: list[str] = []
    for requirement in map(Requirement, requires("mmldlm") or ()):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "mmldlm":  # an extra that contains another
            needed += [install_command(each).removeprefix("pip install ") for each in sorted(requirement.extras)]
        else:
            needed.append(f"'{requirement.name}{requirement.specifier}'")
    return f"pip install {' '.join(needed)}"
