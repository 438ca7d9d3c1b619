"""What the tests of sandboxes share."""

from remote_sandboxes import serve

__all__ = ["serve"]
