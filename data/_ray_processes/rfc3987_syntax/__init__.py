"""Stands first in the path of the Ray processes that a run starts: jsonschema asks for this package at every import."""

raise ImportError("left out: Ray does not need it, and its grammar takes more than a second to compile")
