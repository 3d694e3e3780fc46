"""What no other part of the package needs."""
